"""Checks that a plan read from a file belongs to its graph and can be carried out. No assertions: it is input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from autoshard.cluster.hardware import Hardware, check_mesh
from autoshard.errors import InvalidFileError, UserError
from autoshard.ir.graph import Graph
from autoshard.ir.intervals import multiple
from autoshard.ir.layout import Layout, Shard, parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BUFFER_UPDATE, OUTPUT, Plan, PlanStep, RedistributionPlan, TensorPlan
from autoshard.program.lower import chosen_strategies
from autoshard.program.step_check import check_step
from autoshard.redistribute import BACKWARD, BY_INDEX, FORWARD
from autoshard.rules.algebra.strategy import Strategy

_AGAIN = "make the plan again with `autoshard plan`"
_SIGNED = ("runner_up_seconds",)  # what another choice would cost more, or less
_ENDLESS = ("capacity_bytes",)  # of a plan that was not searched for
_DOES = {*FORWARD.values(), *BACKWARD.values(), *BY_INDEX}


def check_plan(plan: Plan, graph: Graph, hardware: Hardware, where: str) -> None:
    """Raises InvalidFileError, which names the file (`where`) and the first thing in it that can't be."""
    try:
        each = (plan, *map(plan.of_bucket, plan.buckets))
        fault = next((fault for bucket_plan in each for fault in _faults(bucket_plan, graph, hardware)), None)
    except UserError as error:
        fault = error.message
    if fault is not None:
        raise InvalidFileError(f"{where} is damaged: {fault}", _AGAIN)


def _faults(plan: Plan, graph: Graph, hardware: Hardware) -> Iterator[str]:
    check_mesh(hardware, plan.mesh)
    yield from _bad_numbers(plan, "plan")
    for option in ("precision", "optimizer"):
        if getattr(plan, option) != getattr(graph, option):
            yield f"its {option} is {getattr(plan, option)!r}, its graph's {getattr(graph, option)!r}"
    yield from _other_names("input", [t.name for t in plan.inputs], graph.inputs)
    yield from _other_names("parameter", [t.name for t in plan.parameters], [p.tensor for p in graph.parameters])
    yield from _other_names("buffer", [t.name for t in plan.buffers], [b.tensor for b in graph.buffers])
    yield from _other_names("operator", [o.op for o in plan.ops], [op.name for op in graph.ops])
    stored = (*plan.inputs, *plan.parameters, *plan.buffers)
    for tensor in stored:
        yield from _misfit(tensor.layout, graph.tensor(tensor.name).shape, plan.mesh, tensor.name)
    yield from _bad_ways(plan, graph, stored, chosen_strategies(plan, graph))
    check_step(plan.step, graph)


def _bad_numbers(value: Any, place: str) -> Iterator[str]:
    """Figures that are not finite, and those of seconds and bytes that are negative."""
    if isinstance(value, float) and not math.isfinite(value) and (value != math.inf or not place.endswith(_ENDLESS)):
        yield f"{place} is {value}"
    elif isinstance(value, int | float) and value < 0 and not place.endswith(_SIGNED):
        yield f"{place} is {value}, expected at least 0"
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _bad_numbers(item, f"{place}[{number}]")
    elif is_dataclass(value) and not hasattr(value, "parse"):
        for field in fields(value):
            if field.name != "model_arguments":  # a user's own
                yield from _bad_numbers(getattr(value, field.name), f"{place}.{field.name}")


def _other_names(kind: str, planned: Sequence[str], there: Sequence[str]) -> Iterator[str]:
    for name in there:
        if name not in planned:
            yield f"it lacks the {kind} {name}"
    for name in planned:
        if name not in there:
            yield f"the model has no {kind} {name}"
    if list(planned) != list(there):
        yield f"its {kind}s stand in another order than the model's, or twice"


def _misfit(layout: Layout, shape: Sequence[int], mesh: Mesh, name: str) -> Iterator[str]:
    """Reason why a tensor of this shape can't have this layout."""
    if len(layout.placements) != len(mesh.axes):
        yield f"{name} has layout `{layout}`: expected a placement for each axis of {mesh}"
    for shard in layout.placements:
        if not isinstance(shard, Shard):
            continue
        if shard.dim >= len(shape):
            yield f"{name} has layout `{layout}`: it has no dim {shard.dim}, its shape is {tuple(shape)}"
        elif isinstance(shard.unit, tuple) and (sum(shard.unit) != shape[shard.dim] or min(shard.unit) < 1):
            yield f"{name} has layout `{layout}`: {shard} is not made of dim {shard.dim} of {tuple(shape)}"
        elif shard.blocks < 1 or multiple(shard.unit) < 1 or shape[shard.dim] % (shard.blocks * multiple(shard.unit)):
            yield f"{name} has layout `{layout}`: {shard} does not divide dim {shard.dim} of {tuple(shape)}"


def _bad_ways(
    plan: Plan, graph: Graph, stored: Sequence[TensorPlan], strategies: Mapping[str, Strategy]
) -> Iterator[str]:
    """Reasons why operands do not get from where they are to where they are wanted."""
    origin = {tensor.name: tensor.layout for tensor in stored}
    for op in graph.ops:
        origin |= zip(op.results, strategies[op.name].results, strict=True)
    ways = {(r.tensor, r.target): r for r in plan.redistributions}
    if len(ways) != len(plan.redistributions):
        yield "a redistribution stands in it twice"
    for move in plan.redistributions:
        yield from _path_faults(move, plan.mesh, graph, origin)
    for op in graph.ops:
        for name, layout in zip(op.operands, strategies[op.name].operands, strict=True):
            if name is not None and layout is not None and layout != origin[name] and (name, layout) not in ways:
                yield f"op {op.name} reads {name} as `{layout}`, no redistribution leads there from `{origin[name]}`"


def _path_faults(move: RedistributionPlan, mesh: Mesh, graph: Graph, origin: Mapping[str, Layout]) -> Iterator[str]:
    what = f"the redistribution of {move.tensor} to `{move.target}`"
    if move.tensor not in origin:
        yield f"{what}: the model has no tensor {move.tensor}"
        return
    yield from _misfit(move.target, graph.tensor(move.tensor).shape, mesh, move.tensor)
    if move.source != origin[move.tensor]:
        yield f"{what} starts at `{move.source}`, but the tensor is made as `{origin[move.tensor]}`"
    for consumer in move.consumers:
        if consumer not in graph.by_op and consumer not in (OUTPUT, BUFFER_UPDATE, *graph.by_name):
            yield f"{what}: the model has no operator {consumer}"
    current = move.source
    for step in move.steps:
        fault, current = _stepped(step, current, mesh)
        if fault:
            yield f"{what}: {fault}"
            return
    if current != move.target:
        yield f"{what} ends at `{current}`"


def _stepped(step: PlanStep, layout: Layout, mesh: Mesh) -> tuple[str, Layout]:
    """Reason why the step can't be taken, or "", and the layout that it leads to."""
    if not step.axes or not len(step.axes) == len(step.before) == len(step.after):
        return f"the step {step} names {len(step.axes)} axes", layout
    if not {step.forward, step.backward} <= _DOES:
        return f"the step {step} does {step.forward!r} and {step.backward!r}, expected one of {sorted(_DOES)}", layout
    for name, before, after in zip(step.axes, step.before, step.after, strict=True):
        axis = mesh.index(name)
        try:
            here, there = parse_placement(before), parse_placement(after)
        except ValueError as error:
            return f"the step {step}: {error}", layout
        if layout.placements[axis] != here:
            return f"the step {step} starts at {before}, but it is {layout.placements[axis]}", layout
        layout = layout.replace(axis, there)
    return "", layout
