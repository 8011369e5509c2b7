"""Costs of a package's step, from the programs of its parts: `plan` prices a captured model's step by the same.

A part of many layers is priced as one of a few, plus the cost of one more times the number missing. Programs have at
most three parts: the first, the last, and one that stands for all between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.estimate.packages.package_blocks import BATCH, store_of
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_graph import layer, transformer_graph
from autoshard.ir.graph import Graph
from autoshard.ir.plan import BlockPolicy, Plan, StagePart, StepPlan
from autoshard.ir.program import Collective, Program
from autoshard.program.lower import lower
from autoshard.rules.resize.rebatch import rebatched
from autoshard.search.build_plan import Origin, plan_of
from autoshard.simulation.step_timeline import PartCosts, StepCosts
from autoshard.simulation.steps.program_step import MeasuredProgram, PartMeasure, measured_parts, stage_costs
from autoshard.whole_step_search.blocks.block_line import KEPT, block_line
from autoshard.whole_step_search.blocks.context_expert_axes import TENSOR
from autoshard.whole_step_search.blocks.replicated_split import replicated_split

Layers = Mapping[str, int]  # what a layer keeps -> how many of a part's layers keep that


def package_costs(model: Transformer, run: TrainingRun, parts: Sequence[Layers], hardware: Hardware) -> StepCosts:
    """Costs of a step. `parts`: layers of each part, in model order, overriding `run` on layers and recomputation."""
    built = min(len(parts), KEPT)
    measured = []
    for number, layers in enumerate(parts):
        role = 0 if number == 0 else built - 1 if number == len(parts) - 1 else 1
        measured.append(_mixed(model, run, layers, built, role, hardware))
    stages = tuple(stage_costs(measured[stage :: run.pp]) for stage in range(run.pp))
    schedule = run.schedule if run.pp > 1 else "1f1b"
    return StepCosts(schedule, run.micro_batches, tuple(measure.costs for measure in measured), stages)


def _mixed(
    model: Transformer, run: TrainingRun, layers: Layers, built: int, role: int, hardware: Hardware
) -> PartMeasure:
    """Measure of layers that keep different things: each contributes what it does among layers like it; the fullest
    moment is the fullest of any."""
    total = sum(layers.values())
    keeps = [keep for keep, count in layers.items() if count] or ["all"]
    alike = {keep: _of_layers(model, run, total, keep, built, role, hardware) for keep in keeps}
    if len(keeps) == 1:
        return alike[keeps[0]]
    shares = {keep: layers[keep] / total for keep in keeps}
    mixed = _sum([(shares[keep], alike[keep]) for keep in keeps])
    working = max(measure.costs.working_bytes for measure in alike.values())
    return replace(mixed, costs=replace(mixed.costs, working_bytes=working))


def _of_layers(
    model: Transformer, run: TrainingRun, count: int, keep: str, built: int, role: int, hardware: Hardware
) -> PartMeasure:
    def measured(layers: int) -> PartMeasure:
        return _measured(_program_key(model, run, layers, keep, built), hardware)[role]

    most = KEPT + (run.zero == 3 and run.pp == 1)  # one more where layers are gathered a layer ahead
    if 0 < count <= most:
        return measured(count)
    near, more = (most - 1, most) if count else (2, 1)
    times = (count - near) / (more - near)
    return _sum([(1.0 - times, measured(near)), (times, measured(more))])


@dataclass(frozen=True)
class _ProgramKey:
    """Specification of a program: `parts` of `layers` each, every one of which keeps `keep`."""

    model: Transformer
    run: TrainingRun
    layers: int
    keep: str
    parts: int


def _program_key(model: Transformer, run: TrainingRun, layers: int, keep: str, parts: int) -> _ProgramKey:
    """Cache key: equal for runs that need the same programs."""
    several = min(run.micro_batches, 2)
    same = replace(
        run, batch=run.dp * run.micro_batch * several, schedule="1f1b", interleave=1, recompute="none", stage_layers=(),
        zero=run.zero if run.dp > 1 else 0,
    )  # fmt: skip
    return _ProgramKey(replace(model, layers=layers * parts), same, layers, keep, parts)


@lru_cache(maxsize=256)
def _measured(request: _ProgramKey, hardware: Hardware) -> tuple[PartMeasure, ...]:
    """Measures of the parts. Unless weights are gathered for each use, one program serves whatever layers keep."""
    keep_all = replace(request, keep="all")
    policies = tuple(BlockPolicy(layer(n), request.keep) for n in range(request.model.layers) if request.keep != "all")
    program, measured = _measured_program(keep_all, hardware)
    if policies and any(isinstance(step, Collective) and step.regathered for step in program.instructions):
        plan, graph = _plan(keep_all, hardware)
        plan = replace(plan, step=replace(plan.step, recompute=policies))
        return measured_parts(plan, lower(plan, graph), graph, hardware, request.run.pp)
    return measured.keeping(policies)


@lru_cache(maxsize=16)
def _measured_program(request: _ProgramKey, hardware: Hardware) -> tuple[Program, MeasuredProgram]:
    plan, graph = _plan(request, hardware)
    program = lower(plan, graph)
    return program, MeasuredProgram(plan, program, graph, hardware, request.run.pp)


@lru_cache(maxsize=64)
def _plan(request: _ProgramKey, hardware: Hardware) -> tuple[Plan, Graph]:
    """Plan with the splits that a search by blocks uses."""
    model, run = request.model, request.run
    store = store_of(model, run, hardware)
    split = store.costs(((TENSOR, run.tp),), run.micro_batch)[0].split
    captured = transformer_graph(model, BATCH, run.precision, run.optimizer).graph
    graph = rebatched(captured, run.dp * run.micro_batch)
    line = block_line(graph)
    stored, solution = replicated_split(line, captured, store.short, split, run.dp, run.zero > 0, hardware)
    plan = plan_of(stored, solution, Origin(graph.source), float("inf"), "search")
    first = [0] + [line.blocks[1 + request.layers * part].first for part in range(1, request.parts)]
    parts = tuple(StagePart(number, 0, graph.ops[start].name) for number, start in enumerate(first))
    step = StepPlan(run.micro_batches, "1f1b", 1, parts if request.parts > 1 else (), zero=run.zero or 3)
    return replace(plan, step=step), graph


def _sum(parts: Sequence[tuple[float, PartMeasure]]) -> PartMeasure:
    """Weighted sum of the parts, clamped to 0 from below."""

    def added(owns: Sequence[tuple[float, Any]], names: Sequence[str]) -> dict[str, float]:
        return {name: max(0.0, sum(times * float(getattr(part, name)) for times, part in owns)) for name in names}

    costs = added([(times, measure.costs) for times, measure in parts], [f.name for f in fields(PartCosts)])
    others = added(parts, [f.name for f in fields(PartMeasure) if f.name != "costs"])
    return PartMeasure(PartCosts(**costs), **others)
