"""Workflow from a user's model to the files of a package, one function per stage.

Heavy modules are imported where they are used, so that `autoshard --help` is quick and a saved graph needs no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoshard.code_text import typed
from autoshard.errors import InfeasibleError, UsageError
from autoshard.graph_capture.model_spec import LOSS, check_spec, holds_graph
from autoshard.package import output_folder
from autoshard.package.package_files import REPORT, VERIFICATION, read_extras, report_text
from autoshard.system.process_memory import infrequent_gc

if TYPE_CHECKING:
    from autoshard.cluster.hardware import Hardware
    from autoshard.ir.graph import Graph
    from autoshard.ir.mesh import Mesh
    from autoshard.ir.plan import Plan
    from autoshard.replay.simulated_plan import SimulatedPlan
    from autoshard.search.pareto_front import Point
    from autoshard.search.search_request import SearchRequest
    from autoshard.search.search_task import Log, SearchTask
    from autoshard.search.style_plans import StylePlan
    from autoshard.solvers.common.solver_options import Clock
    from autoshard.system.disk_cache import DiskCache
    from autoshard.verification.comparison.proof import Proof

Arguments = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class ModelRequest:
    """Model as the user named it. `precision` and `optimizer` are None if the user did not set them."""

    spec: str
    arguments: Arguments
    precision: str | None = None
    optimizer: str | None = None
    training: bool = True
    modules: tuple[str, ...] = ()  # that the package of a saved graph may import
    several: bool = False  # must the batch be of more than one sample
    dynamic: tuple[str, ...] = ()  # sizes of inputs that change from step to step, as --dynamic has them


def read_graph(request: ModelRequest) -> Graph:
    """Captures the model, or reads a graph saved by `autoshard trace`."""
    check_spec(request.spec)  # before torch is imported
    if request.spec.endswith(".json"):
        return _saved_graph(request)
    from autoshard.graph_capture.capture import capture
    from autoshard.graph_capture.tracing.own_gradients import cached_answers

    settings = (request.precision or "fp32", request.optimizer or "adamw", request.training)
    with cached_answers():
        how = _several if request.several else tuple
        captured = capture(request.spec, request.arguments, *settings, how, request.dynamic)
    return checked(captured)


def _several(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs, checked before a capture, which may take long. UsageError if they have one sample."""
    from autoshard.rules.resize.rebatch import check_several

    check_several([tuple(x.shape) for x in inputs])
    return inputs


def with_probed_sizes(graph: Graph, spec: str, arguments: Arguments) -> Graph:
    """`graph` of the model `spec` with its other possible sizes, found once by further captures. Unchanged for a graph
    from a file, whose model is not there."""
    if graph.free_sizes or graph.dynamic or not spec or holds_graph(spec):
        return graph
    from autoshard.graph_capture.capture import capture
    from autoshard.graph_capture.dynamic_export.concrete import with_sizes
    from autoshard.graph_capture.tracing.own_gradients import cached_answers
    from autoshard.rules.resize.asked_sizes import with_free_sizes

    settings = (graph.precision, graph.optimizer, graph.training)

    def recapture(samples: int, length: int) -> Graph:
        return capture(spec, arguments, *settings, lambda inputs: with_sizes(inputs, samples, length))

    with cached_answers():
        return with_free_sizes(graph, recapture)


def checked(captured: Graph) -> Graph:
    """Captured graph with its calls tried and rules added for operators without one; prints what was assumed."""
    from autoshard.rules.proof.discover import with_discovered
    from autoshard.verification.operator_calls import check_calls, run_emitted

    check_calls(captured)
    _tell_modules(captured)
    for guard in captured.assumed:
        print(f"note: assumed that {guard}", file=sys.stderr)
    graph, warnings = with_discovered(captured, run_call=run_emitted)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return graph


def check_modules(graph: Graph, where: str, allowed: Sequence[str]) -> None:
    """Raises UsageError for a graph from elsewhere whose package would import a module that nobody has confirmed."""
    for item in graph.registrations:
        if item.module and item.module not in allowed:
            targets = ", ".join(item.targets)
            raise UsageError(
                f"{where} names the module {item.module}, which the package would import to register {targets}",
                f"--allow-module {item.module} if you trust its code, or plan from the model itself",
            )
    _tell_modules(graph)


def _tell_modules(graph: Graph) -> None:
    for item in graph.registrations:
        if item.module and not item.text:
            message = f"the package imports {item.module}, which is to register {', '.join(item.targets)}"
            print(f"note: {message}", file=sys.stderr)


def _saved_graph(request: ModelRequest) -> Graph:
    from autoshard.ir import graph_json
    from autoshard.rules.operator_check import check_saved

    graph, unregistered = graph_json.without_code(check_saved(graph_json.load(request.spec), request.spec))
    if unregistered:
        print(
            f"warning: {request.spec} brings Python code that registers {', '.join(unregistered)}; the package "
            "does not get a copy: import it at the top of model_parallel.py, or plan from the model itself",
            file=sys.stderr,
        )
    check_modules(graph, request.spec, request.modules)
    settings = {
        "--precision": (request.precision or graph.precision, graph.precision),
        "--optimizer": (request.optimizer or graph.optimizer, graph.optimizer),
        "--eval": (request.training and graph.training, graph.training),
        "--dynamic": (bool(request.dynamic), False),
        "--with": (sorted({*request.arguments} - {LOSS}), []),
        LOSS: (request.arguments.get(LOSS), None),
    }
    for option, (wanted, captured) in settings.items():
        if wanted != captured:
            raise UsageError(
                f"{option} can't change the saved graph {request.spec}: it was fixed when the model was captured",
                f"autoshard trace MODEL {option} … -o {typed(Path(request.spec))}",
            )
    return graph


@dataclass(frozen=True)
class PlanningResult:
    """Plan, sentences on settings that were not used, a log of durations, and the front, if it was asked for."""

    plan: Plan
    ignored: tuple[str, ...] = ()
    log: tuple[tuple[str, float], ...] = ()
    front: tuple[Point, ...] = ()
    styles: tuple[StylePlan, ...] = ()


MESH_SECONDS = 120.0  # CPU time of a mesh search without --time-limit


def check(request: ModelRequest, wanted: SearchRequest, hardware: Hardware) -> None:
    """Raises a UserError for mistakes that can be found before torch is imported and the model captured."""
    from autoshard.cluster.hardware import check_devices, check_mesh, check_precision
    from autoshard.solvers import check_names

    check_spec(request.spec)
    if LOSS in request.arguments:
        check_spec(str(request.arguments[LOSS]))
        if request.spec.endswith(".pt2"):
            raise UsageError(f"{LOSS} can't change the exported program {request.spec}", "export a model with its loss")
    if not request.spec.endswith(".json"):
        check_precision(hardware, request.precision or "fp32")
    if wanted.random_seed() is None:
        check_names(wanted.solver_name, wanted.ilp_engine)
    if wanted.mesh is not None:
        check_mesh(hardware, wanted.mesh, whole=True)
        wanted.pins_on(wanted.mesh)
    else:
        assert wanted.devices is not None
        check_devices(hardware, wanted.devices)
        wanted.of_one_stage()


@infrequent_gc()
def make_plan(graph: Graph, hardware: Hardware, wanted: SearchRequest) -> PlanningResult:
    """The best plan, or the one that `strategy` (`megatron`, `random:SEED`) asks for; for a histogram of dynamic sizes
    the one with the least expected step.

    Ctrl-C ends the search with the best plan so far. Raises UsageError for settings that are not possible.
    """
    if wanted.servers.said:
        return _on_servers(graph, hardware, wanted)
    if wanted.sizes:
        return _expected(graph, hardware, wanted)
    from autoshard.constraints.model_request import with_requests, without_idle_place
    from autoshard.formulation.planning_context import PlanningContext
    from autoshard.search.fixed_step import check_request, with_place_plans, with_ranks
    from autoshard.search.fixed_styles import random_plan
    from autoshard.search.search_request import micro_batches
    from autoshard.simulation.fusion_sizes import with_unused_fusion

    wanted = replace(wanted, step=without_idle_place(wanted.step, graph))
    typed = wanted.step.text
    step = with_requests(wanted.step, graph)
    step.check()
    wanted = replace(wanted, step=step).of_one_stage()
    seed, ignored = wanted.random_seed(), wanted.ignored()
    if seed is not None:
        assert wanted.mesh is not None  # `random_seed` says so to a user
        context = PlanningContext(graph, wanted.mesh, hardware, wanted.all_to_all, micro_batches(graph, wanted))
        plan = random_plan(context, seed, origin=wanted.origin_of(graph))
        check_request(graph, wanted.step)
        of = partial(replace, context)
        plan = with_place_plans(plan, wanted.step, lambda mesh, _: random_plan(of(mesh=mesh), seed))
        plan = _with_step(plan, graph, hardware, wanted)
        plan = replace(plan, search=replace(plan.search, step_options=typed))
        return PlanningResult(with_ranks(with_unused_fusion(plan, graph)), ignored)
    log: Log = []
    clock = _clock(wanted)
    plan, points, task = _stepped(graph, hardware, wanted, clock, log)
    plan = replace(plan, search=replace(plan.search, notes=(*plan.search.notes, *ignored), step_options=typed))
    plan = with_ranks(with_unused_fusion(plan, graph))
    left = clock if clock.stopped else None
    styles = _styles(plan, graph, hardware, left, log, task, wanted.cache)
    log += _cache_log(wanted.cache)
    return PlanningResult(plan, ignored, tuple(log), points, styles)


def _on_servers(graph: Graph, hardware: Hardware, wanted: SearchRequest) -> PlanningResult:
    """A worker's plan, completed with its servers."""
    from autoshard.servers.server_plan import WORKER, server_plan, worker_search
    from autoshard.servers.server_request import ServerRequest

    worker = worker_search(graph, hardware, wanted.servers, wanted.step)
    pins = (*wanted.pins, *worker.pins)
    request = replace(wanted, mesh=WORKER, devices=None, pins=pins, step=worker.step, servers=ServerRequest())
    try:
        planned = make_plan(worker.graph, worker.hardware, request)
    except InfeasibleError as error:  # of devices and stages, which are no way out here
        ways = ["--recompute full"] * (wanted.step.recompute != "full") + ["a model with a smaller batch"]
        raise InfeasibleError(error.message, " or ".join(ways), proven=error.proven) from error
    plan = server_plan(graph, hardware, wanted.servers, wanted.step, wanted.pins, planned.plan)
    return replace(planned, plan=plan, styles=())


def _expected(graph: Graph, hardware: Hardware, wanted: SearchRequest) -> PlanningResult:
    """Plan with the least expected step; its front and log are those of the largest sizes."""
    from autoshard.constraints.model_request import with_requests
    from autoshard.constraints.size_histogram import points_for
    from autoshard.replay.expected_step import expected_plan, expected_styles
    from autoshard.styles.known_styles import STYLES

    points = points_for(wanted.sizes, graph.dynamic)
    replace(wanted, step=with_requests(wanted.step, graph)).check_buckets()
    alone = replace(wanted, sizes=())
    by_graph: dict[int, PlanningResult] = {}
    searched: list[Graph] = []

    def search(at: Graph) -> PlanningResult:
        searched.append(at)
        by_graph[id(at)] = make_plan(at, hardware, alone)
        return by_graph[id(at)]

    completed = partial(_with_step, graph=graph, hardware=hardware, wanted=alone.of_one_stage())

    def known() -> tuple[StylePlan, ...]:
        """Styles with their expected steps; none at levels that search no size by itself."""
        if len(searched) == 1:
            return ()
        return expected_styles(by_graph[id(graph)].styles, [by_graph[id(at)].styles for at in searched[1:]], points)

    def styles(bar: float) -> Iterator[Plan]:
        """Plans of styles that take less than `bar` with the best plan at every size: a single plan may, too."""
        names = {style.title: name for name, style in STYLES.items()}
        for style in known():
            if alone.strategy == "best" and not alone.pins and 0 < style.predicted_seconds < bar:
                yield make_plan(graph, hardware, replace(alone, strategy=names[style.name])).plan

    def held(at: Graph, mesh: Mesh, pins: tuple[str, ...]) -> Plan:
        request = replace(alone, mesh=mesh, devices=None, pins=(*alone.pins, *pins), cache=None)
        return _stepped(at, hardware, request, _clock(request), [])[0]

    plan = expected_plan(graph, hardware, alone, points, search, completed, styles, held)
    if len(points) < len(wanted.sizes):
        message = f"the {len(wanted.sizes)} sizes of the histogram were grouped into {len(points)}"
        plan = replace(plan, search=replace(plan.search, notes=(*plan.search.notes, message)))
    return replace(by_graph[id(graph)], plan=plan, styles=known())


def _stepped(
    graph: Graph, hardware: Hardware, wanted: SearchRequest, clock: Clock, log: Log
) -> tuple[Plan, tuple[Point, ...], SearchTask | None]:
    """Result of `_searched` with the requested whole step, within the memory limit."""
    from autoshard.constraints.model_request import asks_of_the_step

    if not wanted.step.said and not asks_of_the_step(graph):
        return _searched(graph, hardware, wanted, clock, log)
    from autoshard.search.fixed_step import check_request, with_place_plans
    from autoshard.search.memory_fit import fitting_step
    from autoshard.search.objectives import MEMORY, SPEED
    from autoshard.whole_step_search.optimizer_shards import least_step
    from autoshard.whole_step_search.places.own_parts import with_place_parts

    check_request(graph, wanted.step)
    check_place_devices(hardware, wanted)
    results: list[tuple[Plan, tuple[Point, ...], SearchTask | None]] = []

    def searched(limit_bytes: float, level: int = wanted.level) -> Plan:
        request = replace(wanted, memory_limit_bytes=limit_bytes, level=level)
        plan, points, task = _searched(graph, hardware, request, clock, log)

        @cache
        def place_plan(mesh: Mesh, kind: Hardware) -> Plan:
            room = limit_bytes * (kind.usable_memory_bytes / hardware.usable_memory_bytes)
            sub_request = replace(request, mesh=mesh, pareto=False, memory_limit_bytes=room)
            return _searched(graph, kind, sub_request, clock, log)[0]

        placed = with_place_plans(plan, request.step, lambda mesh, n: place_plan(mesh, hardware.of_ranks(n, mesh.size)))
        results.append((placed, points, task))
        return placed

    def part_plan(part: Graph, mesh: Mesh, kind: Hardware, limit_bytes: float) -> Plan:
        request = replace(wanted, mesh=mesh, pareto=False, memory_limit_bytes=limit_bytes)
        return _searched(part, kind, request, clock, log)[0]

    limit = hardware.usable_memory_bytes if wanted.memory_limit_bytes is None else wanted.memory_limit_bytes
    start = float("inf") if wanted.step.changes_memory or asks_of_the_step(graph) else limit
    completed = partial(_with_step, graph=graph, hardware=hardware, wanted=wanted)
    try:
        plan = fitting_step(searched, completed, limit, start)
    except InfeasibleError:
        if not (results and wanted.searches_parts(graph)):
            raise
        combined = with_place_parts(results[0][0], None, graph, hardware, limit, completed, part_plan)
        if combined is None:
            raise
        return combined, *results[0][1:]
    if wanted.level == MEMORY and wanted.mesh is not None and not clock.over:
        plan = least_step(plan, completed(searched(start, SPEED)))
    if wanted.searches_parts(graph):
        plan = with_place_parts(results[0][0], plan, graph, hardware, limit, completed, part_plan) or plan
    return plan, *results[0][1:]


def used_hardware(graph: Graph, hardware: Hardware, wanted: SearchRequest) -> Hardware:
    """Hardware reduced to the kinds of devices that the requested ranks are on, if it has several."""
    from autoshard.cluster.device_kinds import used
    from autoshard.constraints.model_request import with_requests, without_idle_place

    if not hardware.kinds:
        return hardware
    step = with_requests(without_idle_place(wanted.step, graph), graph)
    if wanted.mesh is None:
        return used(hardware, wanted.devices or 1)
    meshes = step.place_meshes
    return used(hardware, sum(meshes.get(n, wanted.mesh).size for n in range(step.fixed_stages())))


def check_place_devices(hardware: Hardware, wanted: SearchRequest) -> None:
    """Raises UsageError if the meshes of all stages or places have more devices than there are."""
    from autoshard.cluster.hardware import check_devices

    meshes = wanted.step.place_meshes
    if (meshes or hardware.kinds) and wanted.mesh is not None:
        check_devices(hardware, sum(meshes.get(n, wanted.mesh).size for n in range(wanted.step.fixed_stages())))


def _with_step(plan: Plan, graph: Graph, hardware: Hardware, wanted: SearchRequest) -> Plan:
    from autoshard.constraints.model_request import asks_of_the_step
    from autoshard.search.fixed_step import predicted, with_batch_shares, with_step
    from autoshard.whole_step_search.optimizer_shards import fastest_stored

    if not wanted.step.said and not asks_of_the_step(graph):
        return plan
    limit = hardware.usable_memory_bytes if wanted.memory_limit_bytes is None else wanted.memory_limit_bytes

    def completed(plan: Plan) -> Plan:
        stepped = predicted(with_step(plan, graph, wanted.step), graph)
        return with_batch_shares(stepped, graph, wanted.step.batch_shares)

    return fastest_stored(plan, graph, hardware, wanted.step, completed, limit)


def _clock(wanted: SearchRequest) -> Clock:
    """Clock with the user's time limit, or a mesh search's, in CPU time: other load on the machine costs no plan."""
    from autoshard.solvers.common.solver_options import Clock, Computing

    if wanted.time_limit_seconds is not None:
        return Clock(wanted.time_limit_seconds, timer=Computing())
    return Clock(MESH_SECONDS if wanted.mesh is None else float("inf"), timer=Computing())


def _styles(
    plan: Plan,
    graph: Graph,
    hardware: Hardware,
    clock: Clock | None,
    log: Log,
    task: SearchTask | None,
    cache: DiskCache | None,
) -> tuple[StylePlan, ...]:
    """Known styles on the plan's mesh, whatever time is left; Ctrl-C leaves out the remaining ones."""
    from autoshard.search.cached.search_cache import unhurried
    from autoshard.search.search_task import timed
    from autoshard.search.select_plan import simulate_styles
    from autoshard.search.style_plans import style_plans
    from autoshard.solvers.common.solver_options import Clock, interruptible

    timer = clock or Clock()
    with timed(log, "simulating known styles"), interruptible(timer):
        if task is not None and unhurried(timer) and unhurried(task.clock):  # as at the level of the step
            simulate_styles(task)
        if task is None:
            return style_plans(plan, graph, hardware, timer, cache=cache)
        return style_plans(plan, graph, hardware, timer, task.formulation, task.styles, cache)


def _cache_log(cache: DiskCache | None) -> Log:
    """Log lines: what was read from the cache, and why it was not written."""
    if cache is None:
        return []
    return [(text, 0.0) for text in (*(f"read from the cache: {kind}" for kind in cache.used), *cache.faults)]


def _searched(
    graph: Graph, hardware: Hardware, wanted: SearchRequest, clock: Clock, log: Log
) -> tuple[Plan, tuple[Point, ...], SearchTask | None]:
    """The plan, the front if it is asked for, and the search if it leaves nothing out."""
    from autoshard.search import memory_fit, pareto_front, search_task, select_plan
    from autoshard.search.mesh_search import search_meshes
    from autoshard.solvers.common.solver_options import Options, interruptible

    options = Options(clock, wanted.ilp_engine or "highs")
    if wanted.mesh is None:
        with interruptible(clock):
            plan = search_meshes(graph, hardware, wanted, options=options, log=log)
        if not wanted.pareto:
            return plan, (), None
        task = search_task.prepare(graph, plan.mesh, hardware, wanted, options, log)
    else:
        task = search_task.prepare(graph, wanted.mesh, hardware, wanted, options, log)
        with interruptible(clock):  # before, there is nothing to keep
            select_plan.begin(task)
            task, optimum = memory_fit.fitted(task)
            plan = select_plan.best(task, optimum)
    whole = None if task.pins or wanted.strategy != "best" else task
    with interruptible(clock):
        return plan, pareto_front.front(task, plan) if wanted.pareto else (), whole


def verify_package(
    path: Path, built: SimulatedPlan, backend: Literal["gloo", "lockstep"], full: bool, arguments: Arguments
) -> Proof:
    """Runs the package's own files against the original model, and notes the outcome in the package and its report.

    `built`: the plan that was read from it.
    """
    from autoshard.verification import verify_package as verify

    proof = verify(path, backend=backend, full=full, arguments=arguments)
    noted = {key: value for key, value in proof.as_dict().items() if key != "seconds"}
    text = json.dumps(noted, indent=1, ensure_ascii=False) + "\n"
    extras = replace(read_extras(path, verified=False), verification=noted)
    files = {VERIFICATION: text, REPORT: report_text(built, extras)}
    try:
        output_folder.update_package(path, files)
    except UsageError as error:  # a folder that may only be read
        return replace(proof, notes=(*proof.notes, f"no record in the package: {error.message}"))
    return proof
