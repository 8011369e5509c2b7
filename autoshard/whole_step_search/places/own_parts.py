"""Places with separate meshes: each mesh decided only for the operators that its places run.

The operators of a place's parts are a graph: what they read from other places is an input, and what they hand on is
summed into a loss, so that gradients flow back through them. It is searched as a separate model, within the memory of
the place's devices. Operators of other places cost nothing on the mesh: each is split so that what is read from it lies
as the place wants it. A mesh keeps its choice for the whole model if that makes the shorter step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from autoshard import solvers
from autoshard.cluster.hardware import Hardware
from autoshard.errors import InfeasibleError
from autoshard.formulation.cost_breakdown import parts
from autoshard.formulation.fewer_choices import narrowed
from autoshard.formulation.formulate import STORED, Formulation, formulate
from autoshard.formulation.planning_context import context_of
from autoshard.ir.graph import DTYPE_BYTES, Graph, Op
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import PLACED_FIELDS, Plan
from autoshard.ir.problem import Floats, Problem, changed, objective
from autoshard.ir.program import Compute
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.stage_programs import stage_programs
from autoshard.rules.algebra.strategy import Strategy
from autoshard.search.build_plan import Origin, plan_of, priced, with_parts
from autoshard.search.memory_fit import NEAR, TIGHTER
from autoshard.search.objectives import MEMORY, SPEED
from autoshard.simulation.steps.program_step import simulate_plan_step
from autoshard.solvers.common.effort import ROUNDS
from autoshard.solvers.common.result import fits, without_proof
from autoshard.solvers.common.solver_options import Options
from autoshard.units import format_seconds

ELSEWHERE = 1e-6  # times the costs of what other places run: it breaks ties alone


@dataclass
class _OwnPlace:
    """A place: its mesh and devices, the graph of what it runs, the limit of a step, and the plan within the room for a
    micro-batch. Rooms tried: `least_bytes`, which gave a plan that fits or none at all, and `most_bytes`, whose whole
    step does not fit."""

    graph: Graph
    mesh: Mesh
    hardware: Hardware
    limit_bytes: float
    room_bytes: float = math.inf
    plan: Plan | None = None
    least_bytes: float = 0.0
    most_bytes: float = math.inf

    def search(self, searched: Callable[[Graph, Mesh, Hardware, float], Plan]) -> bool:
        """Searches a plan, in more room while there is none in the last; False if none is found."""
        while self.plan is None:
            try:
                self.plan = searched(self.graph, self.mesh, self.hardware, self.room_bytes)
            except InfeasibleError:
                self.least_bytes = max(self.least_bytes, self.room_bytes)
                if not self._between(0.0):
                    return False
        return True

    def narrow(self, peak_bytes: float) -> None:
        """Clears the plan to ask for another by the peak of the place's whole step, unless this one is near enough."""
        assert self.plan is not None
        plan_peak = self.plan.predicted_peak_bytes
        if peak_bytes > self.limit_bytes:
            self.most_bytes = min(self.most_bytes, plan_peak)
        else:
            self.least_bytes = max(self.least_bytes, plan_peak)
        if self._between(plan_peak * self.limit_bytes / peak_bytes * TIGHTER):
            self.plan = None

    def _between(self, likely_bytes: float) -> bool:
        """Sets the room for a micro-batch; False if none is left between too little and too much."""
        inside = self.least_bytes < likely_bytes < self.most_bytes
        self.room_bytes = likely_bytes if inside else (self.least_bytes + self.most_bytes) / 2
        return self.most_bytes - self.least_bytes > NEAR * self.most_bytes and self.most_bytes < math.inf


def with_place_parts(
    plan: Plan,
    known: Plan | None,
    graph: Graph,
    hardware: Hardware,
    limit_bytes: float,
    stepped: Callable[[Plan], Plan],
    searched: Callable[[Graph, Mesh, Hardware, float], Plan],
) -> Plan | None:
    """The best whole step: `known`, the best whose meshes are decided for the whole model, or `plan` with each mesh
    decided for the parts of its places; None if none fits. `stepped`: adds the simulated whole step; `searched`: the
    plan of a graph on a mesh within this many bytes a device."""
    whole = stepped(plan)
    places = _places(whole, graph, hardware, limit_bytes)
    best, nothing = known or whole, dict[Mesh, list[str]]()
    adopted = every = plan, nothing  # with what is noted of each mesh
    for _ in range(ROUNDS):
        if not all(place.search(searched) for place in places):
            break
        for mesh in dict.fromkeys(place.mesh for place in places):
            here = [place for place in places if place.mesh == mesh]
            decided, words = _decided(plan, mesh, here, graph, hardware), {mesh: [_words(place) for place in here]}
            every = _adopted(every[0], mesh, decided, graph, hardware), every[1] | words
            for other in ((_adopted(adopted[0], mesh, decided, graph, hardware), adopted[1] | words), every):
                step = stepped(other[0])
                if _rank(step, limit_bytes) < _rank(best, limit_bytes):
                    best, adopted = step, other
        peaks = simulate_plan_step(step, lower(step, graph), graph, hardware).peak_bytes
        for place, peak in zip(places, peaks, strict=True):
            place.narrow(peak)
        if step.search.level == MEMORY or all(place.plan for place in places):
            break
    if not fits(best.peak_within(limit_bytes), limit_bytes):
        return None
    search = replace(best.search, notes=(*best.search.notes, *chain(*adopted[1].values())))
    return replace(best, search=search, capacity_bytes=limit_bytes)


def _places(whole: Plan, graph: Graph, hardware: Hardware, limit_bytes: float) -> list[_OwnPlace]:
    places = []
    for place, place_graph in enumerate(place_graphs(whole, graph)):
        mesh = whole.meshes[place]
        kind = hardware.of_ranks(whole.first_rank(place), mesh.size)
        limit = limit_bytes * kind.usable_memory_bytes / hardware.usable_memory_bytes
        places.append(_OwnPlace(place_graph, mesh, kind, limit))
    return places


def _rank(step: Plan, limit_bytes: float) -> tuple[float, float]:
    """Sort key, smaller is better: bytes, or those above the limit, then the seconds of a step."""
    size = step.peak_within(limit_bytes)
    return size if step.search.level == MEMORY else max(0.0, size - limit_bytes), step.step_seconds


def _words(place: _OwnPlace) -> str:
    """Sentence on the result for the parts of a place, with its bound."""
    assert place.plan is not None
    bound = place.plan.certificate.level_bound if place.plan.search.level == SPEED else 0.0
    least = f", and no plan of that alone less than {format_seconds(bound)}" if bound else ""
    seconds = format_seconds(place.plan.predicted_seconds)
    return f"{place.mesh} is decided for what its place runs, which takes {seconds} a micro-batch{least}"


@dataclass(frozen=True)
class _Decided:
    """Decisions on a mesh, as fields of a plan, and the sum of their costs."""

    fields: dict[str, Any]
    seconds: float


def _decided(plan: Plan, mesh: Mesh, places: Sequence[_OwnPlace], graph: Graph, hardware: Hardware) -> _Decided:
    """Decisions for the places of a mesh, earlier places first, with operators elsewhere chosen to suit."""
    chosen: dict[str, Strategy] = {}
    stored: dict[str, Layout] = {}
    for place in places:
        assert place.plan is not None
        chosen = chosen_strategies(place.plan, place.graph) | chosen
        stored = {t.name: t.layout for t in (*place.plan.inputs, *place.plan.parameters, *place.plan.buffers)} | stored

    def allowed(op: Op, strategy: Strategy) -> bool:
        return op.name not in chosen or strategy == chosen[op.name]

    kind = hardware if mesh == plan.mesh else places[0].hardware
    whole = formulate(replace(context_of(plan, graph, kind), mesh=mesh), allowed)
    layouts = {
        n: [site.layouts.index(stored[site.name])]
        for n, site in enumerate(whole.sites)
        if site.kind in STORED and stored.get(site.name) in site.layouts
    }
    whole = narrowed(whole, layouts)
    solution = solvers.solve(_light_elsewhere(whole, {*chosen, *stored}), "auto", Options(rough=True))
    origin = Origin(plan.model, plan.model_arguments, plan.fusion)
    solved = plan_of(whole, solution, origin, plan.capacity_bytes, "search")
    solved = with_parts(solved, whole, parts(whole, solution.choice))
    return _Decided({name: getattr(solved, name) for name in PLACED_FIELDS}, objective(whole.problem, solution.choice))


def _adopted(plan: Plan, mesh: Mesh, decided: _Decided, graph: Graph, hardware: Hardware) -> Plan:
    if mesh != plan.mesh:
        others = [replace(other, **decided.fields) if other.mesh == mesh else other for other in plan.place_plans]
        return replace(plan, place_plans=tuple(others))
    adopted = priced(replace(plan, **decided.fields, place_plans=()), graph, hardware)
    level = adopted.predicted_peak_bytes if plan.search.level == MEMORY else adopted.predicted_seconds
    certificate = without_proof(plan.certificate, level, decided.seconds)
    return replace(adopted, place_plans=plan.place_plans, certificate=certificate)


def _light_elsewhere(whole: Formulation, names: Collection[str]) -> Problem:
    """Problem in which operators and weights other than `names` cost next to nothing, unless `names` read them."""
    named = [site.name in names or site.kind == "sink" for site in whole.sites]
    lightened: dict[int, Floats] = {}  # of what is equal once, by which a solver sees what repeats

    def light(seconds: Floats) -> Floats:
        return lightened.setdefault(id(seconds), seconds * ELSEWHERE)

    nodes = [
        node if named[n] else changed(node, seconds=light(node.seconds)) for n, node in enumerate(whole.problem.nodes)
    ]
    values = [
        value if any(named[n] for n in value.consumers) else changed(value, seconds=light(value.seconds))
        for value in whole.problem.values
    ]
    return replace(whole.problem, nodes=tuple(nodes), values=tuple(values))


def place_graphs(plan: Plan, graph: Graph) -> tuple[Graph, ...]:
    """Graph of what each place runs, in a plan with a whole step."""
    op_names: list[set[str]] = [set() for _ in range(plan.step.stages)]
    for place, part in zip(plan.step.part_stages, stage_programs(lower(plan, graph)), strict=True):
        op_names[place] |= {step.op for step in part.instructions if isinstance(step, Compute)}
    operators = [[op for op in graph.ops if op.name in ops] for ops in op_names]
    writes = [{name for op in ops for name in op.results} for ops in operators]
    reads = [{name for op in ops for name in op.operands} - known for ops, known in zip(operators, writes, strict=True)]
    return tuple(part_graph(graph, ops, set[str | None]().union(*reads)) for ops in op_names)


def part_graph(graph: Graph, ops: Collection[str], wanted: Collection[str | None]) -> Graph:
    """Graph of these operators alone; the sum of each `wanted` result becomes a part of the loss."""
    operators = [op for op in graph.ops if op.name in ops]
    results = {name for op in operators for name in op.results}
    updates = tuple(pair for pair in graph.buffer_updates if pair[1] in results)
    read = {name for op in operators for name in op.operands if name} | {buffer for buffer, _ in updates}
    parameters, buffers = (tuple(p for p in group if p.tensor in read) for group in (graph.parameters, graph.buffers))
    stored = {p.tensor for p in (*parameters, *buffers)}
    tensors = [tensor for tensor in graph.tensors if tensor.name in read | results]
    inputs = tuple(t.name for t in tensors if t.name not in results and t.name not in stored)
    total = graph.tensor(graph.loss) if graph.loss in results else None
    outputs = []
    for tensor in [tensor for tensor in tensors if tensor.name in results and tensor.name in wanted]:
        if not tensor.requires_grad or tensor == total:
            outputs += [tensor.name] * (tensor != total)
            continue
        one = replace(tensor, name=f"{tensor.name}__sum", shape=())
        tensors.append(one)
        operators.append(Op(one.name, "aten.sum", (tensor.name,), (("dtype", None),), (one.name,)))
        if total is not None:
            wide = max((total, one), key=lambda term: DTYPE_BYTES[term.dtype])
            both = replace(wide, name=f"{tensor.name}__total")
            tensors.append(both)
            operators.append(Op(both.name, "aten.add", (total.name, one.name), (("alpha", 1),), (both.name,)))
            one = both
        total = one
    return replace(
        graph,
        tensors=tuple(tensors),
        inputs=inputs,
        parameters=parameters,
        buffers=buffers,
        ops=tuple(operators),
        outputs=(*outputs, *([total.name] if total else [])),
        loss=total.name if total else None,
        buffer_updates=updates,
        strategies=tuple(pair for pair in graph.strategies if pair[0] in ops),
        call="",
        free_sizes=(),
    )
