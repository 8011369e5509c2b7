"""From a choice per mesh axis to the layout of every operand and result: the design's section 5, for one axis.

| axis on               | operand with it | multiplied, without | added, without | result with it | without |
|-----------------------|-----------------|---------------------|----------------|----------------|---------|
| a factor              | Shard           | R+                  | R+             | Shard          | –       |
| a summed factor       | Shard           | R+                  | Partial        | Shard          | Partial |
| a joined factor       | Shard           | R+                  | R+             | Shard          | R       |
| nothing, `=`          |                 | R                   | R              |                | R       |
| nothing, `+`          |                 | R+                  | R+             |                | R+      |
| `~0` (a linear group) | Partial         | R+                  | Partial        |                | Partial |
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autoshard.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Layout, Placement, Shard, normalise
from autoshard.mesh import Mesh
from autoshard.rules.instance import Facts, Instance
from autoshard.rules.nesting import Cut, dim_cut, factor_problem, product_problem
from autoshard.rules.notation import Dim, Term
from autoshard.rules.strategy import Choice


@dataclass(frozen=True)
class Placements:
    """What one axis does to every operand (None where absent) and result."""

    operands: tuple[Placement | None, ...]
    results: tuple[Placement, ...]


def choices(instance: Instance, refinements: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]) -> tuple[Choice, ...]:
    """Everything one axis may do, sizes aside: each factor plain, then refined; `=`; `+`; the linear groups."""
    refined = dict(refinements)
    result = []
    for factor in instance.assignable:
        result.append(Choice("factor", factor))
        own = refined.get(factor, ()) if factor not in instance.rule.plain else ()
        result += [Choice("factor", factor, blocks, unit) for blocks, unit in own]
    if instance.rule.together and set(factors_of(instance.rule.together[0])) <= set(instance.assignable):
        result.append(Choice("factor", instance.rule.together[0]))
    result.append(Choice("repeat"))
    if instance.differentiable:
        result.append(Choice("repeat_partial"))
    return (*result, *(Choice("linear", operands=group) for group in instance.rule.linear))


def factors_of(factor: str) -> tuple[str, ...]:
    """The factors that a choice cuts: `t+e` cuts both."""
    return tuple(factor.split("+"))


def placements(instance: Instance, choice: Choice) -> Placements | str:
    """The placements that follow from a choice, or the reason why it can't be (sizes aside)."""
    rule = instance.rule
    summed = choice.kind == "linear" or choice.factor in rule.sum
    operands = tuple(
        None if term is None else _operand(term, position, choice, summed)
        for position, term in enumerate(rule.operands)
    )
    results = tuple(_result(term, choice, summed, choice.factor in rule.joined) for term in rule.results)
    for facts, placement in [
        *zip(instance.operands, operands, strict=True),
        *zip(instance.results, results, strict=True),
    ]:
        if placement == PARTIAL and facts is not None and not facts.floating:
            return f"a {facts.dtype} tensor is never partial"
    return Placements(operands, results)


def _operand(term: Term, position: int, choice: Choice, summed: bool) -> Placement:
    if choice.kind == "repeat":
        return REPLICATE
    if position in choice.operands:
        return PARTIAL
    shard = factor_shard(term, choice)
    if shard is not None:
        return shard
    return PARTIAL if term.added and summed else REPLICATE_PARTIAL


def _result(term: Term, choice: Choice, summed: bool, joined: bool) -> Placement:
    if choice.kind in ("repeat", "repeat_partial"):
        return REPLICATE if choice.kind == "repeat" else REPLICATE_PARTIAL
    return factor_shard(term, choice) or (REPLICATE if joined else PARTIAL if summed else REPLICATE)


def factor_shard(term: Term, choice: Choice) -> Shard | None:
    """Where the axis cuts this term, its blocks and unit left to `resolve` (which knows the sizes)."""
    for index, dim in enumerate(term.dims):
        if choice.factor and any(factor in dim.factors for factor in factors_of(choice.factor)):
            return Shard(index)
    return None


def resolve(instance: Instance, term: Term, choice: Choice, placement: Placement) -> Placement:
    """The shard with its blocks and unit: blocks = pre * k and unit = u * post for a factor inside (pre f post)."""
    if not isinstance(placement, Shard):
        return placement
    dim = term.dims[placement.dim]
    part = next(index for index, part in enumerate(dim.parts) if part in factors_of(choice.factor))
    _, blocks, unit = dim_cut(part_sizes(instance, dim), part, (1, choice.blocks, choice.unit))
    return Shard(placement.dim, blocks, unit)


def part_sizes(instance: Instance, dim: Dim) -> tuple[int, ...]:
    return tuple(part if isinstance(part, int) else instance.size[part] for part in dim.parts)


def sizes_problem(instance: Instance, chosen: tuple[Choice, ...], mesh_sizes: tuple[int, ...]) -> str:
    """Why the sizes forbid these choices, one per axis ("" = they don't)."""
    cuts: dict[str, list[tuple[int, Cut]]] = {}
    for axis, (choice, parts) in enumerate(zip(chosen, mesh_sizes, strict=True)):
        if choice.kind == "factor":
            for factor in factors_of(choice.factor):
                cuts.setdefault(factor, []).append((axis, (parts, choice.blocks, choice.unit)))
    lengths = dict(instance.lengths)
    for factor, own in cuts.items():
        empty = factor in instance.rule.empty
        for size in lengths.get(factor) or (instance.size[factor],):
            reason = factor_problem(size, tuple(cut for _, cut in own), empty)
            if reason:
                return f"{factor}: {reason}"
    if len(cuts) > 1:
        for dim in (dim for term in instance.rule.terms for dim in term.dims if len(dim.parts) > 1):
            reason = _product_problem(instance, dim, cuts)
            if reason:
                return f"{dim}: {reason}"
    return ""


def _product_problem(instance: Instance, dim: Dim, cuts: dict[str, list[tuple[int, Cut]]]) -> str:
    inside = [(axis, dim.parts.index(f), cut) for f in dim.factors for axis, cut in cuts.get(f, ())]
    if len({part for _, part, _ in inside}) < 2:
        return ""
    ordered = tuple((part, cut) for _, part, cut in sorted(inside))
    sizes = part_sizes(instance, dim)
    assert prod(sizes) > 0
    return product_problem(sizes, ordered)


def differentiable(instance: Instance, facts: Facts) -> bool:
    """Does a gradient flow through this operand or result? Without one, `R+` is `R`."""
    return facts.requires_grad and instance.differentiable


def term_layout(
    dims: tuple[Dim, ...], instance: Instance, shape: tuple[int, ...], chosen: tuple[Choice, ...], mesh: Mesh
) -> Layout:
    """The layout of a tensor inside the operator (attention's scores) whose dims are these factors."""
    term = Term(dims)
    own = (resolve(instance, term, choice, factor_shard(term, choice) or REPLICATE) for choice in chosen)
    return normalise(Layout(tuple(own)), shape, mesh, False)
