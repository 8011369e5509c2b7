"""Strategies of an operator on a mesh, and the reasons for those that are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from autoshard.errors import UsageError
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import HOST, Layout, Placement, normalise
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.derive import Placements, choices, differentiable, placements, resolve, sizes_problem
from autoshard.rules.algebra.instance import Instance
from autoshard.rules.algebra.strategy import Choice, Strategy
from autoshard.rules.dynamic_strategies import holds, probes, problem
from autoshard.rules.granularities import Granularities, Refinements
from autoshard.rules.granularities import granularities as granularities_of
from autoshard.rules.host_tables import on_host
from autoshard.rules.operator_table import instance

REPEAT = Choice("repeat")


def strategies(graph: Graph, op: Op, mesh: Mesh, granularities: Granularities) -> tuple[Strategy, ...]:
    """Combinations of choices over the axes that the rule, the sizes and the layouts allow, plainest first.

    Only the first of those with the same layouts and variant is kept.
    """
    every = derive(instance(graph, op), granularities.refinements(op), mesh)
    return _at_all_sizes(graph, op, mesh, every) if graph.dynamic else every


def _at_all_sizes(graph: Graph, op: Op, mesh: Mesh, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """Strategies that hold at every dynamic size; equal operators with equal dynamic dims share one answer."""
    known = probes(graph)
    bound = tuple((instance(one, one.by_op[op.name]), refinements(one, mesh, op.name)) for one in known.graphs)
    key = (bound, every, mesh)
    if key not in known.legal:
        offered = [_by_text(bound_rule, refined, mesh) for bound_rule, refined in bound]
        known.legal[key] = tuple(strategy for strategy in every if holds(graph, op, mesh, strategy, offered))
    return known.legal[key]


def refinements(graph: Graph, mesh: Mesh, name: str) -> Refinements:
    """Blocks and units in which the factors of an operator may be sharded."""
    return granularities_of(graph, mesh).by_op.get(name, ())


def find(graph: Graph, op: Op, mesh: Mesh, granularities: Granularities, text: str) -> Strategy:
    """Strategy that prints as `text`, or means the same; raises UsageError that lists those there are."""
    bound, refined = instance(graph, op), granularities.refinements(op)
    by_text = _by_text(bound, refined, mesh)
    plain = text.removesuffix(f" {HOST}")
    strategy = by_text.get(plain) or _equivalent(bound, refined, mesh, plain)
    if strategy is not None and plain != text:
        strategy = on_host(graph, op, strategy)
    if strategy is None:
        reasons = dict(explain(graph, op, mesh, granularities))
        why = f" ({reasons[text]})" if text in reasons else ""
        message = f"{op.name} ({op.target}) has no strategy {text!r} on {mesh}{why}"
        raise UsageError(message, f"one of: {'; '.join(by_text)}")
    return strategy


def named(graph: Graph, op: Op, mesh: Mesh, granularities: Granularities, text: str) -> Strategy | None:
    """Strategy that prints as `text`, without making the others; None if none does, or if part of it is in host memory.
    Of several that mean the same, `find` returns the one that is offered."""
    return _named(instance(graph, op), granularities.refinements(op), mesh, text)


@cache
def _named(bound: Instance, refined: Refinements, mesh: Mesh, text: str) -> Strategy | None:
    try:
        chosen = tuple(Choice.parse(part) for part in text.split())
    except ValueError:
        return None
    if len(chosen) != len(mesh.axes) or any(
        choice not in (choices(bound, refined) if parts > 1 else [REPEAT]) or _reason(bound, choice, parts)
        for choice, parts in zip(chosen, mesh.sizes, strict=True)
    ):
        return None
    if sizes_problem(bound, _cutting(chosen), mesh.sizes):
        return None
    assemble = _Assembler(bound, mesh)
    return assemble.strategy(chosen, [assemble.placed(choice) for choice in chosen])


def carry(text: str, refined: Refinements, other: Refinements) -> str:
    """Text of the strategy at other sizes: a refinement of a factor becomes the one in its place in `other`.

    Both graphs must have the same structure: `n/3*64` with heads of 64 is `n/3*8` with heads of 8.
    """
    places, others = dict(refined), dict(other)

    def carried(choice: Choice) -> Choice:
        here, there = places.get(choice.factor, ()), others.get(choice.factor, ())
        place = here.index((choice.blocks, choice.unit)) if (choice.blocks, choice.unit) in here else len(there)
        return replace(choice, blocks=there[place][0], unit=there[place][1]) if place < len(there) else choice

    return " ".join(part if part == HOST else str(carried(Choice.parse(part))) for part in text.split())


@cache
def _by_text(bound: Instance, refined: Refinements, mesh: Mesh) -> dict[str, Strategy]:
    return {str(strategy): strategy for strategy in derive(bound, refined, mesh)}


def _equivalent(bound: Instance, refined: Refinements, mesh: Mesh, text: str) -> Strategy | None:
    """Strategy offered under another name: `n*64` is `n` if the axis leaves whole units anyway."""
    try:
        chosen = tuple(Choice.parse(part) for part in text.split())
    except ValueError:
        return None
    if len(chosen) != len(mesh.axes) or not all(_permitted(bound, choice) for choice in chosen):
        return None
    if any(_reason(bound, c, n) for c, n in zip(chosen, mesh.sizes, strict=True)):
        return None
    if sizes_problem(bound, chosen, mesh.sizes):
        return None
    assemble = _Assembler(bound, mesh)
    wanted = assemble.strategy(chosen, [assemble.placed(choice) for choice in chosen])
    same = (s for s in derive(bound, refined, mesh) if _meaning(s) == _meaning(wanted))
    return next(same, None)


def _permitted(bound: Instance, choice: Choice) -> bool:
    """True if this is a choice of the rule, with any blocks and unit."""
    refined = ((choice.factor, ((choice.blocks, choice.unit),)),) if choice.kind == "factor" else ()
    return choice in choices(bound, refined)


def _meaning(strategy: Strategy) -> tuple[object, ...]:
    return strategy.operands, strategy.results, strategy.variant


def explain(graph: Graph, op: Op, mesh: Mesh, granularities: Granularities) -> list[tuple[str, str]]:
    """(choice text, reason) of what is left out: single choices as `n@tp`, combinations of possible ones as `n n/3`."""
    bound = instance(graph, op)
    refined = granularities.refinements(op)
    reasons = [(factor, "the operator needs all of it") for factor in bound.rule.whole]
    if not bound.known:
        reasons.append((op.target, "there is no rule for this operator: every axis repeats it"))
    for name, parts in mesh.axes:
        for choice in choices(bound, refined):
            reason = _reason(bound, choice, parts)
            if reason:
                reasons.append((f"{choice}@{name}", reason))
    for chosen in product(*_options(bound, refined, mesh)):
        reason = sizes_problem(bound, chosen, mesh.sizes)
        if reason:
            reasons.append((" ".join(map(str, chosen)), reason))
    return [*reasons, *_dynamic_reasons(graph, op, mesh, granularities)]


def _dynamic_reasons(graph: Graph, op: Op, mesh: Mesh, granularities: Granularities) -> list[tuple[str, str]]:
    """(choice text, reason) of strategies that fail at some dynamic size; a choice on one axis also as `n@tp`."""
    if not graph.dynamic:
        return []
    every = derive(instance(graph, op), granularities.refinements(op), mesh)
    legal = {str(strategy) for strategy in _at_all_sizes(graph, op, mesh, every)}
    reasons = []
    for strategy in every:
        if str(strategy) not in legal:
            reason = problem(graph, op, mesh, strategy)
            reasons.append((str(strategy), reason))
            cutting = [
                (name, choice) for name, choice in zip(mesh.names, strategy.choices, strict=True) if choice != REPEAT
            ]
            reasons += [(f"{choice}@{name}", reason) for name, choice in cutting] if len(cutting) == 1 else []
    return reasons


@cache
def derive(bound: Instance, refined: Refinements, mesh: Mesh) -> tuple[Strategy, ...]:
    """Strategies of a bound rule: equal operators in repeated layers share one answer."""
    distinct: dict[tuple[object, ...], Strategy] = {}
    assemble = _Assembler(bound, mesh)
    reasons: dict[tuple[Choice, ...], str] = {}
    options = _options(bound, refined, mesh)
    for chosen in product(*([(choice, assemble.placed(choice)) for choice in allowed] for allowed in options)):
        choices_ = tuple(choice for choice, _ in chosen)
        cutting = _cutting(choices_)
        if cutting not in reasons:
            reasons[cutting] = sizes_problem(bound, cutting, mesh.sizes)
        if not reasons[cutting]:
            strategy = assemble.strategy(choices_, [placed for _, placed in chosen])
            distinct.setdefault(_meaning(strategy), strategy)
    return tuple(distinct.values())


def _cutting(chosen: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Choices without those that shard no factor."""
    return tuple(choice if choice.kind == "factor" else REPEAT for choice in chosen)


def _options(bound: Instance, refined: Refinements, mesh: Mesh) -> list[list[Choice]]:
    """Choices that each axis has by itself; an axis of size 1 only repeats."""
    return [
        [c for c in choices(bound, refined) if not _reason(bound, c, parts)] if parts > 1 else [REPEAT]
        for parts in mesh.sizes
    ]


def _reason(bound: Instance, choice: Choice, parts: int) -> str:
    """Reason why an axis of `parts` devices can't make this choice by itself."""
    if parts == 1:
        return "" if choice == REPEAT else "the axis has one device"
    result = _placed(bound, choice)
    return result if isinstance(result, str) else sizes_problem(bound, (choice,), (parts,))


@cache
def _placed(bound: Instance, choice: Choice) -> Placements | str:
    """The placements of a choice, shards with their blocks and units."""
    plain = placements(bound, choice)
    if isinstance(plain, str):
        return plain
    operands = tuple(
        None if term is None or placement is None else resolve(bound, term, choice, placement)
        for term, placement in zip(bound.rule.operands, plain.operands, strict=True)
    )
    pairs = zip(bound.rule.results, plain.results, strict=True)
    return Placements(operands, tuple(resolve(bound, term, choice, placement) for term, placement in pairs))


class _Assembler:
    """Combines the choices of all axes. `layouts` caches normalised layouts by operand or result."""

    def __init__(self, bound: Instance, mesh: Mesh) -> None:
        self.bound, self.mesh = bound, mesh
        self.gradients = [facts is not None and differentiable(bound, facts) for facts in bound.operands]
        self.layouts: dict[tuple[int, tuple[Placement, ...]], Layout] = {}

    def placed(self, choice: Choice) -> Placements:
        placed = _placed(self.bound, choice)
        assert isinstance(placed, Placements), placed
        return placed

    def strategy(self, chosen: tuple[Choice, ...], axes: Sequence[Placements]) -> Strategy:
        """Strategy with the layouts that follow from valid choices, normalised."""
        operands: list[Layout | None] = []
        for position, facts in enumerate(self.bound.operands):
            placements = tuple(placement for axis in axes if (placement := axis.operands[position]) is not None)
            gradient = self.gradients[position]
            operands.append(None if facts is None else self.layout(position, placements, facts.shape, gradient))
        results = tuple(
            self.layout(~position, tuple(axis.results[position] for axis in axes), facts.shape, facts.requires_grad)
            for position, facts in enumerate(self.bound.results)
        )
        return Strategy(chosen, tuple(operands), results, _variant(self.bound, chosen))

    def layout(self, place: int, placements: tuple[Placement, ...], shape: tuple[int, ...], gradient: bool) -> Layout:
        if (place, placements) not in self.layouts:
            self.layouts[place, placements] = normalise(Layout(placements), shape, self.mesh, gradient)
        return self.layouts[place, placements]


def _variant(bound: Instance, chosen: tuple[Choice, ...]) -> str:
    """Variant that runs if an axis is on one of its factors, or always if it names none."""
    factors = bound.rule.variant_factors
    for together in bound.rule.together:
        if any(choice.factor == together.name for choice in chosen):
            return together.variant
    return bound.rule.variant if not factors or any(choice.factor in factors for choice in chosen) else ""


def offered(graph: Graph, mesh: Mesh, granularities: Granularities) -> Iterator[tuple[Op, tuple[Strategy, ...]]]:
    """Ops, each with its strategies, in execution order."""
    for op in graph.ops:
        yield op, strategies(graph, op, mesh, granularities)
