"""The decisions of a plan, carried over to the same model at other sizes (fewer layers, a shorter sequence)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from autoshard import rules
from autoshard.cluster.hardware import Hardware
from autoshard.errors import UsageError
from autoshard.formulation.planning_context import context_of
from autoshard.ir.graph import Graph, Op
from autoshard.ir.graph_json import graph_hash
from autoshard.ir.layout import Layout, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import (
    BUFFER_UPDATE,
    OUTPUT,
    Plan,
    PlanStep,
    RedistributionPlan,
    SizeBucket,
    StepPlan,
    TensorPlan,
)
from autoshard.program.schedules.placed_parts import placed_parts
from autoshard.program.step_check import dealt
from autoshard.rules.algebra.float8_products import PLAIN
from autoshard.rules.algebra.strategy import Strategy
from autoshard.search.build_plan import priced, redistribution
from autoshard.search.fixed_step import balanced_parts

Key = tuple[str, str, int]  # (module, target, ordinal among these): a name of an op that holds across sizes
Place = tuple[Key, int]  # an operand of an op; outputs are ops of their own


def reapply(plan: Plan, full: Graph, reduced: Graph, hardware: Hardware, mesh: Mesh | None = None) -> Plan:
    """Carries `plan` of `full` over to `reduced`, and to another `mesh` of the same axes if one is passed.

    Ops correspond by module path and position in their module, stored tensors by their path, and a redistribution keeps
    its steps if it joins the same layouts for the same operand. Raises UsageError if a decision has no counterpart.
    """
    mesh = mesh or plan.mesh
    strategies = _strategies(plan, full, reduced, mesh)
    decided = {op.op: op for op in plan.ops}
    names = {key: op.name for key, op in keyed_ops(full).items()}
    ops = {
        op.name: replace(decided[names[key]], op=op.name, strategy=str(strategies[op.name]))
        for key, op in keyed_ops(reduced).items()
    }
    inputs, parameters, buffers = (_carried(t, reduced, full) for t in (plan.inputs, plan.parameters, plan.buffers))
    draft = replace(
        plan,
        mesh=mesh,
        graph_hash=graph_hash(reduced),
        inputs=inputs,
        parameters=parameters,
        buffers=buffers,
        ops=tuple(ops[op.name] for op in reduced.ops),
        redistributions=(),
        step=_carried_shares(_carried_step(plan, full, reduced), plan.mesh, mesh),
    )
    needed = _needed(draft, plan, full, reduced, strategies)
    redistributions = tuple(_carried_steps(need, draft, reduced, hardware) for need in needed)
    applied = priced(replace(draft, redistributions=redistributions, buckets=()), reduced, hardware)
    return replace(
        applied, buckets=tuple(_carried_bucket(bucket, plan, full, reduced, hardware, mesh) for bucket in plan.buckets)
    )


def _carried_bucket(
    bucket: SizeBucket, plan: Plan, full: Graph, reduced: Graph, hardware: Hardware, mesh: Mesh
) -> SizeBucket:
    applied = reapply(plan.of_bucket(bucket), full, reduced, hardware, mesh)
    return replace(bucket, ops=applied.ops, redistributions=applied.redistributions)


def _carried_step(plan: Plan, full: Graph, reduced: Graph) -> StepPlan:
    """Step whose parts begin with the same operators; if some of these are gone, as many parts of the layers left."""
    keys = {op.name: key for key, op in keyed_ops(full).items()}
    names = {key: op.name for key, op in keyed_ops(reduced).items()}
    modules = {path for path, _ in reduced.modules}
    step = replace(plan.step, recompute=tuple(policy for policy in plan.step.recompute if policy.module in modules))
    if step.placed:
        carried = [tuple(names.get(keys[op], "") for op in part.ops) for part in step.parts]
        if "" in itertools.chain(*carried) or len(names) != len(keys):
            return replace(step, parts=placed_parts(reduced, step.places))
        pairs = zip(step.parts, carried, strict=True)
        return replace(step, parts=tuple(replace(part, first_op=ops[0], ops=ops) for part, ops in pairs))
    firsts = [names.get(keys[part.first_op]) for part in step.parts]
    if None not in firsts:
        parts = tuple(replace(part, first_op=op or "") for part, op in zip(step.parts, firsts, strict=True))
        return replace(step, parts=parts)
    decided = {keys[op.op]: op for op in plan.ops}
    ops = tuple(replace(decided[key], op=op.name) for key, op in keyed_ops(reduced).items())
    return replace(step, parts=balanced_parts(replace(plan, ops=ops), reduced, step.stages, step.virtual_stages))


def _carried_shares(step: StepPlan, planned: Mesh, mesh: Mesh) -> StepPlan:
    """Step with shares of the batch in the same proportions, on as many coordinates as `mesh` has."""
    count = mesh.sizes[0]
    if not step.batch_shares or count == planned.sizes[0]:
        return step
    some = [step.batch_shares[number * planned.sizes[0] // count] for number in range(count)]
    shares = dealt([1 / share for share in some], step.micro_batches * count)
    return replace(step, batch_shares=shares if count > 1 else ())


def with_rules_of(full: Graph, reduced: Graph) -> Graph:
    """`reduced` with what `full` records of its operators: discovered rules, by module and position, and code."""
    rules = {key: full.rule_of[op.name] for key, op in keyed_ops(full).items() if op.name in full.rule_of}
    discovered = tuple((op.name, rules[key]) for key, op in keyed_ops(reduced).items() if key in rules)
    ruled = replace(reduced, discovered=discovered, registrations=full.registrations)
    return replace(ruled, manual_splits=_splits_of(full, reduced))


def _splits_of(full: Graph, reduced: Graph) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Row lengths in which each table may be sharded, for as many rows as there are."""
    path_of = {p.tensor: p.path for p in full.parameters}
    present = {p.path: p.tensor for p in reduced.parameters}
    pairs = ((present.get(path_of.get(tensor, "")), lengths) for tensor, lengths in full.manual_splits)
    return tuple((table, scaled(lengths, reduced.tensor(table).shape[0])) for table, lengths in pairs if table)


def scaled(lengths: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Parts of `size` in about the same proportions, none of them empty."""
    if sum(lengths) == size:
        return lengths
    if size < len(lengths):
        message = f"{size} rows can't be cut in {len(lengths)} parts as the planned ones are"
        raise UsageError(message, f"at least {len(lengths)} rows")
    ends = [round(sum(lengths[: n + 1]) * (size - len(lengths)) / sum(lengths)) for n in range(len(lengths))]
    return tuple(end - start + 1 for start, end in zip((0, *ends), ends, strict=False))


def keyed_ops(graph: Graph) -> dict[Key, Op]:
    """Operators by module, target and number among their like there. Float8 at one size may not be so at another."""
    counts: dict[tuple[str, str], int] = {}
    keyed = {}
    for op in graph.ops:
        target = PLAIN.get(op.target, op.target)
        number = counts.get((op.module, target), 0)
        counts[op.module, target] = number + 1
        keyed[op.module, target, number] = op
    return keyed


def _strategies(plan: Plan, full: Graph, reduced: Graph, mesh: Mesh) -> dict[str, Strategy]:
    granularities, full_granularities = rules.granularities(reduced, mesh), rules.granularities(full, plan.mesh)
    decided = {op.op: op.strategy for op in plan.ops}
    full_ops = keyed_ops(full)
    strategies = {}
    for key, op in keyed_ops(reduced).items():
        if key not in full_ops:
            raise UsageError(
                f"{op.name} ({op.target} in {op.module or 'the model'}) has no counterpart at full size",
                "reduce sizes only (layers, sequence, vocabulary), not the structure of a layer",
            )
        name = full_ops[key].name
        text = rules.carry(decided[name], full_granularities.refinements(full_ops[key]), granularities.refinements(op))
        strategies[op.name] = rules.find(reduced, op, mesh, granularities, text)
    return strategies


def _carried(tensors: Sequence[TensorPlan], reduced: Graph, full: Graph) -> tuple[TensorPlan, ...]:
    present = {p.path: p.tensor for p in (*reduced.parameters, *reduced.buffers)}
    present |= dict(zip(full.inputs, reduced.inputs, strict=True))
    return tuple(
        replace(t, name=name, layout=_resized(t.layout, reduced.tensor(name).shape))
        for t in tensors
        for name in [present.get(t.path)]
        if name is not None
    )


def _resized(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Layout whose shards of fixed lengths are those of a tensor of this shape."""
    for axis, shard in enumerate(layout.placements):
        if isinstance(shard, Shard) and isinstance(shard.unit, tuple):
            layout = layout.replace(axis, replace(shard, unit=scaled(shard.unit, shape[shard.dim])))
    return layout


class _Need:
    """A tensor needed in another layout than it is made in, by which consumer, and the steps known for it, if any."""

    def __init__(self, tensor: str, source: Layout, target: Layout) -> None:
        self.tensor, self.source, self.target = tensor, source, target
        self.consumers: list[str] = []
        self.steps: tuple[PlanStep, ...] | None = None


def _needed(draft: Plan, plan: Plan, full: Graph, graph: Graph, strategies: dict[str, Strategy]) -> list[_Need]:
    known = _known_steps(plan, full)
    sources = {t.name: t.layout for t in (*draft.inputs, *draft.parameters, *draft.buffers)}
    needs: dict[tuple[str, Layout], _Need] = {}

    def ask(tensor: str, target: Layout, consumer: str, place: Place) -> None:
        if target != sources[tensor]:
            need = needs.setdefault((tensor, target), _Need(tensor, sources[tensor], target))
            need.consumers.append(consumer)
            redistributed = known.get(place)
            if redistributed and (redistributed.source, redistributed.target) == (need.source, target):
                need.steps = redistributed.steps

    for key, op in keyed_ops(graph).items():
        strategy = strategies[op.name]
        for position, (name, layout) in enumerate(zip(op.operands, strategy.operands, strict=True)):
            if name is not None and layout is not None:
                ask(name, layout, op.name, (key, position))
        sources |= dict(zip(op.results, strategy.results, strict=True))
    for position, name in enumerate(graph.outputs):
        place = (("", "output", position), 0)
        if place in known:
            ask(name, known[place].target, OUTPUT, place)
    stored = {t.name: t.layout for t in draft.buffers}
    for position, (buffer, name) in enumerate(graph.buffer_updates):
        ask(name, stored[buffer], BUFFER_UPDATE, (("", "update", position), 0))
    return list(needs.values())


def _known_steps(plan: Plan, full: Graph) -> dict[Place, RedistributionPlan]:
    known: dict[Place, RedistributionPlan] = {}
    keys = {op.name: key for key, op in keyed_ops(full).items()}
    for r in plan.redistributions:
        for consumer in r.consumers:
            if consumer in keys:
                operands = full.by_op[consumer].operands
                known |= {(keys[consumer], i): r for i, name in enumerate(operands) if name == r.tensor}
            elif consumer == OUTPUT:
                known[("", "output", full.outputs.index(r.tensor)), 0] = r
    return known


def _carried_steps(need: _Need, draft: Plan, graph: Graph, hardware: Hardware) -> RedistributionPlan:
    context = context_of(draft, graph, hardware)
    move = redistribution(context, need.tensor, need.source, need.target, need.consumers)
    return replace(move, steps=need.steps) if need.steps is not None else move
