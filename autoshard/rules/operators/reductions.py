"""Reductions over dims, and operators that run along a dim."""

from __future__ import annotations

from math import prod

from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    Localise,
    LocaliseVariant,
    OperatorCall,
    RuleFor,
    letters,
    replaced,
    term,
)
from autoshard.rules.operators.normalisation import over_dim


def _reduced(call: OperatorCall, dims: tuple[int, ...]) -> tuple[str, str]:
    """The left and right side of a reduction, and the factors it reduces."""
    names = letters(call.rank)
    kept = "1" if call.get("keepdim") else ""
    result = replaced(names, dict.fromkeys(dims, kept))
    return f"{term(names)} -> {', '.join(result for _ in call.results)}", " ".join(names[dim] for dim in dims)


def sum_over(call: OperatorCall) -> str:
    text, factors = _reduced(call, call.dims())
    return f"{text} | sum: {factors} | linear: 0" if factors else f"{text} | linear: 0"


def mean(call: OperatorCall) -> str:
    """The mean over a cut dim divides by the global count: a variant."""
    if call.get("dtype") is not None:
        return whole_over(call) + " | linear: 0"
    text, factors = _reduced(call, call.dims())
    return (
        f"{text} | sum: {factors} | linear: 0 | variant: parallel_mean {factors}" if factors else f"{text} | linear: 0"
    )


def whole_over(call: OperatorCall) -> str:
    """max, norm, variance...: no sum of partial results gives the result."""
    text, factors = _reduced(call, call.dims())
    return f"{text} | whole: {factors}" if factors else text


def whole_over_one(call: OperatorCall) -> str:
    """argmax, max with indices: one dim, or all where none is given."""
    return whole_over(call)


def cumulative(call: OperatorCall) -> str:
    return over_dim(call) + " | linear: 0"


def along_dim(call: OperatorCall) -> str:
    """Length changes along one whole dim: diff, sort, topk."""
    names = letters(call.rank)
    dim = call.dim(default=-1)
    results = [replaced(names, {dim: str(shape[dim])}) for shape in call.results]
    return f"{replaced(names, {dim: str(call.shape[dim])})} -> {', '.join(results)}"


def diff(call: OperatorCall) -> str:
    """Operands `prepend` and `append` are optional; all are whole along the dim."""
    names = letters(call.rank)
    dim = call.dim(default=-1)
    sides = ["-" if shape is None else replaced(names, {dim: str(shape[dim])}) for shape in call.shapes]
    return f"{', '.join(sides)} -> {replaced(names, {dim: str(call.results[0][dim])})}"


def triangle(call: OperatorCall) -> str:
    """tril and triu look at positions in the last two dims."""
    names = letters(call.rank)
    return f"{term(names)} -> {term(names)} | whole: {' '.join(names[-2:])} | linear: 0"


def localise_mean(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    facts = local.instance.operands[0]
    assert facts is not None
    call = OperatorCall(local.op, (facts.shape,), (facts.dtype,), ())
    count = prod(facts.shape[dim] for dim in call.dims())
    return {"dim": call.dims(), "keepdim": bool(call.get("keepdim")), "count": count}, ()


RULES: dict[str, str | RuleFor] = {
    "aten.all": whole_over,
    "aten.amax": whole_over,
    "aten.amin": whole_over,
    "aten.any": whole_over,
    "aten.argmax": whole_over_one,
    "aten.argmin": whole_over_one,
    "aten.argsort": along_dim,
    "aten.cummax": over_dim,
    "aten.cumprod": over_dim,
    "aten.cumsum": cumulative,
    "aten.diff": diff,
    "aten.linalg_vector_norm": whole_over,
    "aten.logcumsumexp": over_dim,
    "aten.logsumexp": whole_over,
    "aten.max": whole_over_one,
    "aten.mean": mean,
    "aten.min": whole_over_one,
    "aten.norm": whole_over,
    "aten.prod": whole_over_one,
    "aten.sort": along_dim,
    "aten.std": whole_over,
    "aten.sum": sum_over,
    "aten.topk": along_dim,
    "aten.tril": triangle,
    "aten.triu": triangle,
    "aten.var": whole_over,
}
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {"parallel_mean": localise_mean}
