"""Reductions over dims, and operators that run along a dim."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod

from autoshard.ir.graph import Op
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    OperatorCall,
    letters,
    replaced,
    term,
)
from autoshard.rules.algebra.operator_record import Operator, each, with_formulas
from autoshard.rules.algebra.saved_for_backward import NOTHING, keeps
from autoshard.rules.algebra.variant_record import (
    Formulas,
    KeptTensors,
    Layouts,
    LocalTensors,
    OperatorVariant,
    Temporary,
    bytes_of,
    temporaries,
)
from autoshard.rules.operators.normalisation import over_dim


def _reduced(call: OperatorCall, dims: tuple[int, ...]) -> tuple[str, str]:
    """Left and right side of a reduction, and the factors it reduces."""
    names = letters(call.rank)
    filler = "1" if call.get("keepdim") else ""
    result = replaced(names, dict.fromkeys(dims, filler))
    return f"{term(names)} -> {', '.join(result for _ in call.results)}", " ".join(names[dim] for dim in dims)


def sum_over(call: OperatorCall) -> str:
    text, factors = _reduced(call, call.dims())
    return f"{text} | sum: {factors} | linear: 0" if factors else f"{text} | linear: 0"


def mean(call: OperatorCall) -> str:
    """Rule of a mean: over a sharded dim it divides by the global count, by a variant."""
    if call.get("dtype") is not None:
        return whole_over(call) + " | linear: 0"
    text, factors = _reduced(call, call.dims())
    return (
        f"{text} | sum: {factors} | linear: 0 | variant: parallel_mean {factors}" if factors else f"{text} | linear: 0"
    )


def whole_over(call: OperatorCall) -> str:
    """Rule of max, norm, variance...: no sum of partial results gives the result."""
    text, factors = _reduced(call, call.dims())
    return f"{text} | whole: {factors}" if factors else text


def whole_over_one(call: OperatorCall) -> str:
    """Rule of argmax, max with indices: over one dim, or all if there is no argument."""
    return whole_over(call)


def cumulative(call: OperatorCall) -> str:
    return over_dim(call) + " | linear: 0"


def along_dim(call: OperatorCall) -> str:
    """Rule of diff, sort, topk: the length changes along one whole dim."""
    names = letters(call.rank)
    dim = call.dim(default=-1)
    results = [replaced(names, {dim: str(shape[dim])}) for shape in call.results]
    return f"{replaced(names, {dim: str(call.shape[dim])})} -> {', '.join(results)}"


def diff(call: OperatorCall) -> str:
    """Rule of diff: operands `prepend` and `append` are optional; all are whole along the dim."""
    names = letters(call.rank)
    dim = call.dim(default=-1)
    sides = ["-" if shape is None else replaced(names, {dim: str(shape[dim])}) for shape in call.shapes]
    return f"{', '.join(sides)} -> {replaced(names, {dim: str(call.results[0][dim])})}"


def triangle(call: OperatorCall) -> str:
    """Rule of tril and triu, which depend on positions in the last two dims."""
    names = letters(call.rank)
    return f"{term(names)} -> {term(names)} | whole: {' '.join(names[-2:])} | linear: 0"


def localise_mean(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    facts = local.instance.operands[0]
    assert facts is not None
    call = OperatorCall(local.op, (facts.shape,), (facts.dtype,), ())
    count = prod(facts.shape[dim] for dim in call.dims())
    return {"dim": call.dims(), "keepdim": bool(call.get("keepdim")), "count": count}, ()


def extreme_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Temporary bytes in backward of an extreme of all elements: (x == y) * (g / (x == y).sum()), in its dtype."""
    formulas: Formulas = {} if "dim" in dict(op.attributes) else {0: 2.25}
    return temporaries(formulas)(mesh, op, operands, layouts, results)


def norm_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Temporary bytes in backward: x * (g / y); of the largest, x.sgn() * (abs(x) == y) * (g / count)."""
    attributes = dict(op.attributes)
    power = attributes.get("p", attributes.get("ord", 2))
    largest = isinstance(power, float) and math.isinf(power)
    return temporaries({0: 3.25 if largest else 1})(mesh, op, operands, layouts, results)


def cosine_keeps(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> KeptTensors:
    """One operand over its norm for each that needs a gradient."""
    return KeptTensors(more_bytes=bytes_of(*(x for x in operands if x is not None and x.requires_grad)))


def distance_keeps(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> KeptTensors:
    """Both operands with their squared norms beside them: distances are sums of products."""
    return KeptTensors(more_bytes=bytes_of(*operands))


def cosine_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Temporary bytes: the operands over their norms, less those kept, and their product."""
    held = temporaries({0: 3, 1: 2}, 3)(mesh, op, operands, layouts, results)
    return replace(held, forward=held.forward - cosine_keeps(mesh, op, operands, layouts, results).more_bytes)


FORMULAS: list[tuple[str, Formulas]] = [  # as in elementwise.py
    ("nanmean nansum", {0: 1.5}),  # g * x.isnan().logical_not(), as floats
    ("diff", {0: 1}),  # the gradients of both ends, each padded
    ("std var", {0: 1}),  # 2 / n * g * (x - x.mean())
    ("std_mean var_mean", {0: 2}),  # of both results
    ("amax amin", {0: 1.25}),  # (x == y) * (g / (x == y).sum())
    ("cumsum", {0: 2}),  # g.flip().cumsum().flip()
    ("prod", {0: 5.25}),  # where x has zeros: products of those before and of those after
    ("logcumsumexp", {0: 7}),  # of positive and negative g: (log(g) - y).flip().logcumsumexp().flip() + x
    ("cumprod", {0: 7.75}),  # where x has zeros: sums of y * g up to the first, and between the first and the next
]
OPERATORS: dict[str, Operator] = {
    "aten.all": Operator(rule=whole_over, spelling="{0}.all(<@dim><keepdim=False>)", dims="dim"),
    "aten.amax": Operator(rule=whole_over, spelling="{0}.amax({dim}<keepdim=False>)", dims="dim"),
    "aten.amin": Operator(rule=whole_over, spelling="{0}.amin({dim}<keepdim=False>)", dims="dim"),
    "aten.any": Operator(rule=whole_over, spelling="{0}.any(<@dim><keepdim=False>)", dims="dim"),
    "aten.argmax": Operator(rule=whole_over_one, spelling="{0}.argmax(<@dim><keepdim=False>)", dims="dim"),
    "aten.argmin": Operator(rule=whole_over_one, spelling="{0}.argmin(<@dim><keepdim=False>)", dims="dim"),
    "aten.argsort": Operator(rule=along_dim, in_torch=True, dims="dim"),
    "aten.cdist": Operator(autocast="high", holds=temporaries({0: 3, 1: 3}, 1), keeps=distance_keeps),
    **each("frobenius_norm nuclear_norm pdist", Operator(autocast="high")),
    "aten.cosine_similarity": Operator(autocast="high", in_torch=True, holds=cosine_holds, keeps=cosine_keeps),
    **each("count_nonzero gradient pairwise_distance quantile", Operator(in_torch=True)),
    "aten.cummax": Operator(rule=over_dim, in_torch=True, dims="dim"),
    **each("cummin kthvalue mode nansum std_mean var_mean", Operator(in_torch=True, dims="dim")),
    "aten.cumprod": Operator(
        rule=over_dim,
        saves=keeps(0, results=(0,)),
        autocast="high_by_default",
        spelling="{0}.cumprod({dim}<dtype>)",
        dims="dim",
    ),
    "aten.cumsum": Operator(
        rule=cumulative,
        saves=NOTHING,
        autocast="high_by_default",
        spelling="{0}.cumsum({dim}<dtype>)",
        result_name="total",
        dims="dim",
    ),
    "aten.diff": Operator(rule=diff, spelling="torch.diff({0}<n=1><dim=-1><prepend:1><append:2>)", dims="dim"),
    "aten.dist": Operator(autocast="high", in_torch=True, holds=temporaries({0: 2, 1: 2}, 1)),
    "aten.linalg_matrix_norm": Operator(autocast="high_by_default"),
    "aten.linalg_norm": Operator(autocast="high_by_default"),
    "aten.linalg_vector_norm": Operator(rule=whole_over, autocast="high_by_default", holds=norm_holds, dims="dim"),
    "aten.logcumsumexp": Operator(rule=over_dim, saves=keeps(0, results=(0,)), in_torch=True, dims="dim"),
    "aten.logsumexp": Operator(
        holds=temporaries({0: 2}, 1),
        rule=whole_over,
        autocast="high",
        spelling="{0}.logsumexp({dim}<keepdim=False>)",
        dims="dim",
    ),
    **each("max min", Operator(rule=whole_over_one, in_torch=True, holds=extreme_holds, dims="dim")),
    "aten.mean": Operator(rule=mean, saves=NOTHING, spelling="{0}.mean(<@dim><keepdim=False><dtype>)", dims="dim"),
    "aten.median": Operator(in_torch=True, holds=extreme_holds, dims="dim"),
    "aten.nanmean": Operator(dims="dim"),
    "aten.nanmedian": Operator(dims="dim"),
    "aten.norm": Operator(rule=whole_over, autocast="high", in_torch=True, holds=norm_holds, dims="dim"),
    "aten.prod": Operator(rule=whole_over_one, autocast="high_by_default", in_torch=True, dims="dim"),
    "aten.sort": Operator(rule=along_dim, in_torch=True, dims="dim"),
    "aten.std": Operator(rule=whole_over, in_torch=True, dims="dim"),
    "aten.sum": Operator(
        rule=sum_over,
        saves=NOTHING,
        autocast="high_by_default",
        spelling="{0}.sum(<@dim=()><keepdim=False><dtype>)",
        dims="dim",
    ),
    "aten.topk": Operator(rule=along_dim, spelling="{0}.topk({k}<dim=-1><largest=True><sorted=True>)", dims="dim"),
    "aten.tril": Operator(rule=triangle, spelling="{0}.tril(<@diagonal=0>)"),
    "aten.triu": Operator(rule=triangle, spelling="{0}.triu(<@diagonal=0>)"),
    "aten.var": Operator(rule=whole_over, in_torch=True, dims="dim"),
}
OPERATORS = with_formulas(OPERATORS, FORMULAS)
VARIANTS: dict[str, OperatorVariant] = {
    "parallel_mean": OperatorVariant(localise=localise_mean),
}
