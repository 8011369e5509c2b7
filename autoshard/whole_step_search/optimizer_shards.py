"""Stores the weights of a plan in shards over the devices that would hold them alike (ZeRO), or as they are used.

Every operator keeps its strategy; what changes is the storage of weights, the collectives that gather them for their
uses, and how long they stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoshard import solvers
from autoshard.cluster.hardware import Hardware
from autoshard.constraints.step_request import AUTO, StepRequest
from autoshard.formulation.cost_breakdown import parts
from autoshard.formulation.fewer_choices import narrowed
from autoshard.formulation.formulate import Formulation, Site, formulate
from autoshard.formulation.planning_context import context_of
from autoshard.ir.graph import DTYPE_BYTES, Graph, Op
from autoshard.ir.layout import Layout
from autoshard.ir.plan import PLACED_FIELDS, Plan
from autoshard.program.lower import chosen_strategies
from autoshard.rules.algebra.strategy import Strategy
from autoshard.search.build_plan import Origin, plan_of, priced, with_parts
from autoshard.search.objectives import MEMORY
from autoshard.solvers.common.result import without_proof
from autoshard.solvers.common.solver_options import Options
from autoshard.whole_step_search.blocks.weight_shards import (
    is_summed,
    is_whole,
    may_cast,
    shard_layouts,
    weight_sites,
    weight_uses,
)

DECIDED = "zero"  # who decided where a weight is stored


@dataclass(frozen=True)
class ZeroRequest:
    """Stage `level` of ZeRO; weights of at most `threshold_bytes`, whole, are stored as they are used.

    `summed`: in shards only over the devices over which the gradient is a sum, such as replicas. Devices that compute
    the same gradient, as for a norm's weight under tensor parallelism, keep a copy each: more memory, fewer gathers.
    """

    level: int
    threshold_bytes: float = 0.0
    summed: bool = False


def fastest_stored(
    plan: Plan,
    graph: Graph,
    hardware: Hardware,
    request: StepRequest,
    completed: Callable[[Plan], Plan],
    limit_bytes: float,
) -> Plan:
    """`completed` plan with its weights stored in one of the ways asked for: the fastest that fits, or the one that
    needs least. If all ways are allowed, the plan as found is a candidate too."""
    copies = any(request.zero_levels) and _copied(plan, graph)
    ways = [
        ZeroRequest(level, request.threshold_bytes, summed)
        for level in request.zero_levels
        for summed in ((False, True) if level and copies else (False,))
    ]
    candidates = [completed(with_shards(plan, graph, hardware, wanted)) for wanted in ways]
    candidates += [completed(plan)] if request.zero in (None, AUTO) and not request.enable_parallel_optimizer else []
    if plan.search.level == MEMORY:
        return min(candidates, key=_leaner)
    least = min(step_bytes(candidate) for candidate in candidates)
    fitting = [candidate for candidate in candidates if step_bytes(candidate) <= max(limit_bytes, least)]
    return min(fitting, key=lambda candidate: _leaner(candidate)[::-1])


def step_bytes(plan: Plan) -> float:
    """Peak bytes of the fullest device in the whole step."""
    return plan.step.predicted_peak_bytes or plan.predicted_peak_bytes


def _leaner(plan: Plan) -> tuple[float, float]:
    return step_bytes(plan), plan.step.predicted_seconds or plan.predicted_seconds


def least_step(least: Plan, fastest: Plan) -> Plan:
    """Plan of level 1: `least`, which holds least in a micro-batch on one stage, or `fastest` if its whole step, in
    which gradients are added up, needs less."""
    if _leaner(least) <= _leaner(fastest):
        return least
    certificate = without_proof(fastest.certificate, fastest.predicted_peak_bytes)
    message = (
        "the fastest plan, whose whole step needs less memory than that of the plan of least memory in a micro-batch"
    )
    search = replace(fastest.search, level=MEMORY, notes=(*fastest.search.notes, message))
    return replace(fastest, certificate=certificate, search=search)


def with_shards(plan: Plan, graph: Graph, hardware: Hardware, wanted: ZeroRequest) -> Plan:
    """`plan` with its weights stored as `wanted` says, on the axes on which every use has them whole; with separate
    meshes for places, on their axes."""
    sharded = _stored_on(plan, graph, hardware, wanted)
    placed = []
    for place_plan in plan.place_plans:
        kind = hardware.of_ranks(plan.first_rank(place_plan.place), place_plan.mesh.size)
        stored = _stored_on(plan.of_place(place_plan), graph, kind, wanted)
        placed.append(replace(place_plan, **{name: getattr(stored, name) for name in PLACED_FIELDS}))
    step = replace(plan.step, zero=wanted.level or 3)
    sharded = replace(sharded, step=step, place_plans=tuple(placed))
    return _noted(priced(sharded, graph, hardware), plan, wanted)


def _stored_on(plan: Plan, graph: Graph, hardware: Hardware, wanted: ZeroRequest) -> Plan:
    """`plan` with its weights stored as `wanted` on its own mesh, and without a step."""
    chosen = chosen_strategies(plan, graph)
    uses = weight_uses(graph, chosen)
    weights = {p.tensor for p in graph.parameters}

    def allowed(op: Op, strategy: Strategy) -> bool:
        cast = may_cast(op, strategy, weights)
        return strategy == chosen[op.name] if cast is None else cast

    formulation = formulate(context_of(plan, graph, hardware), allowed)
    keep = {
        n: _stored(site, uses[site.name], graph, formulation, wanted) for n, site in weight_sites(formulation, uses)
    }
    restricted = narrowed(_with_inputs(formulation, plan), keep)
    solution = solvers.solve(restricted.problem, "auto", Options(rough=True))
    origin = Origin(plan.model, plan.model_arguments, plan.fusion)
    sharded = plan_of(restricted, solution, origin, plan.capacity_bytes, "search")
    sharded = with_parts(sharded, restricted, parts(restricted, solution.choice))
    stored = tuple(replace(p, decided_by=DECIDED) for p in sharded.parameters)
    deciders = {op.op: op.decided_by for op in plan.ops}
    ops = tuple(replace(op, decided_by=deciders[op.op]) for op in sharded.ops)
    return replace(sharded, parameters=stored, ops=ops)


def _noted(sharded: Plan, plan: Plan, wanted: ZeroRequest) -> Plan:
    """`sharded` without the proof, which holds for the plan before, and with a note on its weights."""
    certificate = without_proof(plan.certificate, sharded.predicted_seconds, sharded.certificate.objective_seconds)
    small = f", those of more than {wanted.threshold_bytes / 1024:g} KB," if wanted.threshold_bytes else ""
    over = "sum their gradients" if wanted.summed else "use them alike"
    what = f"weights{small} are stored in shards over the devices that {over}" if wanted.level else ""
    message = (
        f"{what or 'weights are stored as they are used'}, as ZeRO {wanted.level} asks: operators were chosen before"
    )
    search = replace(plan.search, notes=(*plan.search.notes, message))
    return replace(sharded, certificate=certificate, search=search, versions=plan.versions)


def _copied(plan: Plan, graph: Graph) -> bool:
    """Does some weight have an axis along which every device uses it whole, and computes the same gradient of it?"""
    uses = weight_uses(graph, chosen_strategies(plan, graph)).values()
    axes = [axis for axis, size in enumerate(plan.mesh.sizes) if size > 1]
    here = any(is_whole(layouts, axis) and not is_summed(layouts, axis) for layouts in uses for axis in axes)
    return here or any(_copied(plan.of_place(place_plan), graph) for place_plan in plan.place_plans)


def _stored(site: Site, uses: list[Layout], graph: Graph, formulation: Formulation, wanted: ZeroRequest) -> list[int]:
    """Layouts of a weight that satisfy `wanted`."""
    tensor = graph.tensor(site.name)
    size = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
    whole = wanted.level == 0 or size <= wanted.threshold_bytes
    axes = range(len(formulation.mesh.sizes))
    free = [is_whole(uses, axis) and (not wanted.summed or is_summed(uses, axis)) for axis in axes]
    return shard_layouts(site, uses, formulation.mesh.sizes, free, whole)


def _with_inputs(formulation: Formulation, plan: Plan) -> Formulation:
    """Formulation in which inputs and buffers keep the plan's layouts."""
    stored = {t.name: t.layout for t in (*plan.inputs, *plan.buffers)}
    keep = {
        n: [site.layouts.index(stored[site.name])]
        for n, site in enumerate(formulation.sites)
        if site.kind in ("input", "buffer") and stored.get(site.name) in site.layouts
    }
    return narrowed(formulation, keep)
