"""Layouts of every operand and result from a choice per mesh axis: the design's section 5, for one axis.

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

from autoshard.ir.intervals import Cut, Unit
from autoshard.ir.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Layout, Placement, Shard, normalise
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.instance import Instance, TensorFacts
from autoshard.rules.algebra.nesting import dim_cut, factor_problem, product_problem
from autoshard.rules.algebra.notation import Dim, Rule, Term, Together
from autoshard.rules.algebra.strategy import Choice


@dataclass(frozen=True)
class Placements:
    """Placements of every operand (None if absent) and result on one axis."""

    operands: tuple[Placement | None, ...]
    results: tuple[Placement, ...]


def choices(
    instance: Instance, refinements: tuple[tuple[str, tuple[tuple[int, Unit], ...]], ...]
) -> tuple[Choice, ...]:
    """Choices that one axis has, sizes aside: each factor plain, then refined; `=`; `+`; the linear groups."""
    refined = dict(refinements)
    result = []
    for factor in instance.assignable:
        result.append(Choice("factor", factor))
        plain = factor in instance.rule.plain  # never in blocks or units
        allowed = [r for r in refined.get(factor, ()) if isinstance(r[1], tuple) or not plain]
        result += [Choice("factor", factor, blocks, unit) for blocks, unit in allowed]
    present = set(instance.rule.factors)
    result += [Choice("factor", one.name) for one in instance.rule.together if present.issuperset(one.factors)]
    result.append(Choice("repeat"))
    if instance.differentiable:
        result.append(Choice("repeat_partial"))
    return (*result, *(Choice("linear", operands=group) for group in instance.rule.linear))


def together(rule: Rule, choice: Choice) -> Together | None:
    """Choice of several factors at once in the rule, if `choice` is one."""
    return next((one for one in rule.together if one.name == choice.factor), None)


def cut_part(rule: Rule, dim: Dim, choice: Choice) -> int | None:
    """Index of the dim's part that the choice shards, if any."""
    if choice.factor in dim.parts:
        return dim.parts.index(choice.factor)
    several = together(rule, choice) if rule.together else None
    return several.part(dim) if several else None


def placements(instance: Instance, choice: Choice) -> Placements | str:
    """Placements that follow from a choice, or the reason why it can't be (sizes aside)."""
    rule = instance.rule
    summed = choice.kind == "linear" or choice.factor in rule.sum
    operands = tuple(
        None if term is None else _operand(rule, term, position, choice, summed)
        for position, term in enumerate(rule.operands)
    )
    results = tuple(_result(rule, term, choice, summed) for term in rule.results)
    for facts, placement in [
        *zip(instance.operands, operands, strict=True),
        *zip(instance.results, results, strict=True),
    ]:
        if placement == PARTIAL and facts is not None and not facts.floating:
            return f"a {facts.dtype} tensor is never partial"
    return Placements(operands, results)


def _operand(rule: Rule, term: Term, position: int, choice: Choice, summed: bool) -> Placement:
    if choice.kind == "repeat":
        return REPLICATE
    if position in choice.operands:
        return PARTIAL
    shard = factor_shard(rule, term, choice)
    if shard is not None:
        return shard
    return PARTIAL if term.added and summed else REPLICATE_PARTIAL


def _result(rule: Rule, term: Term, choice: Choice, summed: bool) -> Placement:
    if choice.kind in ("repeat", "repeat_partial"):
        return REPLICATE if choice.kind == "repeat" else REPLICATE_PARTIAL
    otherwise = PARTIAL if summed and choice.factor not in rule.joined else REPLICATE
    return factor_shard(rule, term, choice) or otherwise


def factor_shard(rule: Rule, term: Term, choice: Choice) -> Shard | None:
    """Shard of this term on the axis, its blocks and unit left to `resolve` (which knows the sizes)."""
    if choice.kind != "factor":
        return None
    return next((Shard(i) for i, dim in enumerate(term.dims) if cut_part(rule, dim, choice) is not None), None)


def resolve(instance: Instance, term: Term, choice: Choice, placement: Placement) -> Placement:
    """Shard with its blocks and unit: blocks = pre * k and unit = u * post for a factor inside (pre f post)."""
    if not isinstance(placement, Shard):
        return placement
    dim = term.dims[placement.dim]
    part, several = cut_part(instance.rule, dim, choice), together(instance.rule, choice)
    assert part is not None
    if several and several.product:
        return placement
    _, blocks, unit = dim_cut(part_sizes(instance, dim), part, (1, choice.blocks, choice.unit))
    return Shard(placement.dim, blocks, unit)


def part_sizes(instance: Instance, dim: Dim) -> tuple[int, ...]:
    return tuple(part if isinstance(part, int) else instance.size[part] for part in dim.parts)


def sizes_problem(instance: Instance, chosen: tuple[Choice, ...], mesh_sizes: tuple[int, ...]) -> str:
    """Reason why the sizes forbid these choices, one per axis ("" = they don't)."""
    cuts: dict[str, list[tuple[int, Cut]]] = {}
    several = []
    for axis, (choice, parts) in enumerate(zip(chosen, mesh_sizes, strict=True)):
        if choice.kind == "factor":
            one = together(instance.rule, choice) if instance.rule.together else None
            several += [one] if one else []
            for factor in one.factors if one and not one.product else (choice.factor,):
                cuts.setdefault(factor, []).append((axis, (parts, choice.blocks, choice.unit)))
    reason = _together_problem(instance, several, cuts)
    if reason:
        return reason
    lengths = {**dict(instance.lengths), **{t.name: (_product_size(instance, t),) for t in several if t.product}}
    for factor, axis_cuts in cuts.items():
        empty = factor in instance.rule.empty
        for size in lengths.get(factor) or (instance.size[factor],):
            reason = factor_problem(size, tuple(cut for _, cut in axis_cuts), empty)
            if reason:
                return f"{factor}: {reason}"
    if len(cuts) > 1:
        for dim in (dim for term in instance.rule.terms for dim in term.dims if len(dim.parts) > 1):
            reason = _product_problem(instance, dim, cuts)
            if reason:
                return f"{dim}: {reason}"
    return ""


def _product_size(instance: Instance, several: Together) -> int:
    return prod(instance.size[factor] for factor in several.factors)


def _together_problem(instance: Instance, several: list[Together], cuts: dict[str, list[tuple[int, Cut]]]) -> str:
    """Reason why choices of several factors can't be combined ("" = they can)."""
    for one in several:
        for other in several:
            if one != other and set(one.factors) & set(other.factors):
                return f"{one.name} and {other.name} cut the same factors"
        joins = any(factor in instance.rule.whole for factor in one.factors)
        if joins and any(len(cuts.get(factor, ())) > several.count(one) for factor in one.factors):
            return f"{one.name} leaves its factors to no other choice"
        if one.product and any(factor in cuts for factor in one.factors):
            return f"{one.name} cuts what another axis cuts"
        if one.product and instance.size[one.factors[0]] % prod(parts for _, (parts, _, _) in cuts[one.name]) == 0:
            return f"{one.factors[0]} can be cut alone"
    return ""


def _product_problem(instance: Instance, dim: Dim, cuts: dict[str, list[tuple[int, Cut]]]) -> str:
    inside = [(axis, dim.parts.index(f), cut) for f in dim.factors for axis, cut in cuts.get(f, ())]
    if len({part for _, part, _ in inside}) < 2:
        return ""
    ordered = tuple((part, cut) for _, part, cut in sorted(inside))
    sizes = part_sizes(instance, dim)
    assert prod(sizes) > 0
    return product_problem(sizes, ordered)


def differentiable(instance: Instance, facts: TensorFacts) -> bool:
    """True if a gradient flows through this operand or result. Without one, `R+` is `R`."""
    return facts.requires_grad and instance.differentiable


def term_layout(
    dims: tuple[Dim, ...], instance: Instance, shape: tuple[int, ...], chosen: tuple[Choice, ...], mesh: Mesh
) -> Layout:
    """The layout of a tensor inside the operator (attention's scores) whose dims are these factors."""
    term = Term(dims)
    placements = (
        resolve(instance, term, choice, factor_shard(instance.rule, term, choice) or REPLICATE) for choice in chosen
    )
    return normalise(Layout(tuple(placements)), shape, mesh, False)
