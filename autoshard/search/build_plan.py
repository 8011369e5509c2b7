"""Plans from solutions: every decision in the words of the graph, and the real cost of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from autoshard import redistribute
from autoshard.cluster.hardware import Hardware, hardware_text
from autoshard.formulation.formulate import STORED, Formulation, Site
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import graph_hash
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import (
    BUFFER_UPDATE,
    OUTPUT,
    Certificate,
    Fusion,
    OpPlan,
    Parts,
    Plan,
    PlanStep,
    RedistributionPlan,
    Search,
    StepPlan,
    TensorPlan,
)
from autoshard.search.cached.search_cache import HELD
from autoshard.solvers.common.result import Solution

if TYPE_CHECKING:
    from autoshard.ir.program import Program
    from autoshard.simulation.timeline import Timeline

_MOVES: WeakKeyDictionary[Formulation, dict[tuple[int, ...], tuple[RedistributionPlan, ...]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Origin:
    """The user's model and its keyword arguments, so that a plan can be rebuilt and verified; and how collectives of
    any plan of it go together."""

    model: str = ""
    arguments: tuple[tuple[str, str | int | float | bool], ...] = ()
    fusion: tuple[Fusion, ...] = ()


def priced(plan: Plan, graph: Graph, hardware: Hardware) -> Plan:
    """Plan with the step time and peak memory of the very program that is emitted; for a step of several micro-batches
    with the mean time of one, on one stage that keeps all."""
    from autoshard.simulation.steps.program_step import mean_seconds

    outcome = simulated(plan, graph, hardware)
    seconds = mean_seconds(outcome.program, outcome.timeline, graph, hardware, plan.step.micro_batches)
    priced_plan = replace(plan, predicted_seconds=seconds, predicted_peak_bytes=outcome.timeline.peak_bytes)
    _keep(graph, priced_plan, outcome)
    return priced_plan


@dataclass(frozen=True, eq=False)
class Simulated:
    """The program of a plan, and its step on `hardware`. `decided`: the decisions that the program was made from."""

    program: Program
    timeline: Timeline
    hardware: Hardware
    decided: tuple[object, ...]


def simulated(plan: Plan, graph: Graph, hardware: Hardware) -> Simulated:
    """Program and step of the plan, cached for the fastest and smallest of those `priced`: one is usually written."""
    from autoshard.program.lower import lower
    from autoshard.simulation import simulate

    decided = _decided(plan)
    for _, outcome in graph.once(_best).values():
        if outcome.hardware is hardware and outcome.decided == decided:
            return outcome
    program = lower(plan, graph)
    return Simulated(program, simulate(program, graph, hardware), hardware, decided)


def _decided(plan: Plan) -> tuple[object, ...]:
    """Parts of a plan that its program depends on, in addition to the graph."""
    stored = tuple((t.name, t.layout) for t in (*plan.inputs, *plan.parameters, *plan.buffers))
    chosen = tuple((op.op, op.strategy) for op in plan.ops)
    return (
        plan.place_plans,
        plan.mesh,
        plan.step,
        plan.fusion,
        plan.precision,
        plan.optimizer,
        stored,
        chosen,
        plan.redistributions,
    )


def _best(graph: Graph) -> dict[str, tuple[float, Simulated]]:
    """Name of a measure -> its least value, and the program of that plan."""
    return {}


def _keep(graph: Graph, plan: Plan, outcome: Simulated) -> None:
    for what, figure in (("seconds", plan.predicted_seconds), ("bytes", plan.predicted_peak_bytes)):
        known = graph.once(_best).get(what)
        if known is None or figure < known[0]:
            graph.once(_best)[what] = figure, outcome


def plan_of(
    formulation: Formulation,
    solution: Solution,
    origin: Origin,
    capacity_bytes: float,
    decided_by: str,
    fixed: frozenset[int] = frozenset(),
) -> Plan:
    """Plan of every decision of `solution`, in the words of the graph. `fixed`: the nodes that a pin decided."""
    graph, sites = formulation.graph, formulation.sites
    deciders = ["pin" if n in fixed else decided_by for n in range(len(sites))]
    chosen = list(zip(sites, solution.choice, deciders, strict=True))
    paths = {p.tensor: p.path for p in (*graph.parameters, *graph.buffers)}
    stored = {
        kind: tuple(
            TensorPlan(s.name, paths.get(s.name, s.name), s.layouts[c], by) for s, c, by in chosen if s.kind == kind
        )
        for kind in STORED
    }
    plan = Plan(
        graph_hash=graph_hash(graph),
        model=origin.model,
        model_arguments=origin.arguments,
        mesh=formulation.mesh,
        hardware=formulation.hardware.name,
        hardware_text=hardware_text(formulation.hardware),
        precision=graph.precision,
        optimizer=graph.optimizer,
        inputs=stored["input"],
        parameters=stored["parameter"],
        buffers=stored["buffer"],
        ops=_op_plans(formulation, chosen),
        redistributions=_moves_of(formulation, tuple(solution.choice)),
        predicted_seconds=solution.objective,
        predicted_peak_bytes=solution.peak_bytes,
        capacity_bytes=capacity_bytes,
        certificate=Certificate(solution.solver, solution.status, solution.objective, solution.lower_bound),
        versions=_versions(),
        step=StepPlan(formulation.context.micro_batches),
        search=Search(all_to_all=formulation.context.all_to_all),
        fusion=origin.fusion,
    )
    from autoshard.simulation.fusion_sizes import with_sizes

    return with_sizes(plan, graph, formulation.hardware)


def with_parts(plan: Plan, formulation: Formulation, parts: Sequence[Parts]) -> Plan:
    """Plan with the cost of each choice; `parts` by node."""
    by_site = {(site.kind, site.name): part for site, part in zip(formulation.sites, parts, strict=True)}
    inputs, parameters, buffers = (
        tuple(replace(tensor, parts=by_site[kind, tensor.name]) for tensor in tensors)
        for kind, tensors in zip(STORED, (plan.inputs, plan.parameters, plan.buffers), strict=True)
    )
    ops = tuple(replace(op, parts=by_site["op", op.op]) for op in plan.ops)
    return replace(plan, inputs=inputs, parameters=parameters, buffers=buffers, ops=ops)


def labelled(plan: Plan, formulation: Formulation, by: Mapping[int, str]) -> Plan:
    """Plan with another word for who decided the nodes that `by` names."""
    words = {(formulation.sites[n].kind, formulation.sites[n].name): word for n, word in by.items()}
    inputs, parameters, buffers = (
        tuple(replace(tensor, decided_by=words.get((kind, tensor.name), tensor.decided_by)) for tensor in tensors)
        for kind, tensors in zip(STORED, (plan.inputs, plan.parameters, plan.buffers), strict=True)
    )
    ops = tuple(replace(op, decided_by=words.get(("op", op.op), op.decided_by)) for op in plan.ops)
    return replace(plan, inputs=inputs, parameters=parameters, buffers=buffers, ops=ops)


def _versions() -> tuple[tuple[str, str], ...]:
    from autoshard import __version__  # of this very code: a clone need not be installed

    return (("autoshard", __version__), ("numpy", np.__version__))


def _op_plans(formulation: Formulation, chosen: Sequence[tuple[Site, int, str]]) -> tuple[OpPlan, ...]:
    from autoshard import costs

    hardware, mesh, graph = formulation.hardware, formulation.mesh, formulation.graph
    known: dict[tuple[int, int], tuple[str, float, float]] = {}
    op_plans = []
    for site, choice, by in chosen:
        if site.kind == "op":
            strategy = site.strategies[choice]
            key = id(site.strategies), choice  # equal operators, and no others, have the same tuple of strategies
            if key not in known:
                known[key] = (str(strategy), *costs.op_seconds(hardware, mesh, graph, graph.by_op[site.name], strategy))
            text, forward, backward = known[key]
            op_plans.append(OpPlan(site.name, text, strategy.variant, forward, backward, by))
    return tuple(op_plans)


def _moves_of(formulation: Formulation, choice: tuple[int, ...]) -> tuple[RedistributionPlan, ...]:
    """Result of `_redistributions`, cached: the plan of a choice is needed when found and when compared."""
    known = _MOVES.setdefault(formulation, {})
    if choice not in known:
        known[choice] = _redistributions(formulation, choice)
        for oldest in list(known)[:-HELD]:
            del known[oldest]
    return known[choice]


def _redistributions(formulation: Formulation, choice: Sequence[int]) -> tuple[RedistributionPlan, ...]:
    from autoshard import costs

    graph = formulation.graph
    known: dict[tuple[object, ...], RedistributionPlan] = {}
    moves = []
    for value, site in zip(formulation.problem.values, formulation.values, strict=True):
        if site.tied:
            continue
        source = site.sources[value.source[choice[value.producer]]]
        consumers: dict[Layout, list[str]] = {}
        for consumer, targets in zip(value.consumers, value.targets, strict=True):
            target = site.targets[targets[choice[consumer]]]
            consumers.setdefault(target, []).append(_label(formulation.sites[consumer]))
        for target, names in consumers.items():
            if target != source:
                info = graph.tensor(site.tensor)
                key = costs.moving_facts(graph, info), source, target
                if key not in known:
                    known[key] = redistribution(formulation.context, site.tensor, source, target, ())
                moves.append(replace(known[key], tensor=site.tensor, consumers=tuple(names)))
    return tuple(moves)


def _label(site: Site) -> str:
    return site.name if site.kind == "op" else OUTPUT if site.name.startswith("output") else BUFFER_UPDATE


def redistribution(
    context: PlanningContext, tensor: str, source: Layout, target: Layout, consumers: Sequence[str]
) -> RedistributionPlan:
    """Cheapest path from `source` to `target`, with its price: its seconds include what backward gathers again."""
    from autoshard import costs

    mesh, value = context.mesh, context.graph.tensor(tensor)
    terms = costs.moving_terms(context.hardware, mesh, context.graph, value, context.all_to_all)
    path = redistribute.path(source, target, terms)
    steps = tuple(_plan_step(step, mesh) for step in path.steps)
    backward = path.backward_seconds + (terms.forward_times - 1) * path.forward_seconds
    return RedistributionPlan(tensor, source, target, tuple(consumers), steps, path.forward_seconds, backward)


def _plan_step(step: redistribute.Step, mesh: Mesh) -> PlanStep:
    before, after = (tuple(map(str, placements)) for placements in (step.before, step.after))
    return PlanStep(tuple(mesh.names[axis] for axis in step.axes), before, after, step.forward, step.backward)
