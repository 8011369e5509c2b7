"""Search over meshes: every sensible factorisation of the devices onto the links of the profile, keeping the best."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.cluster.hardware import Hardware, check_devices
from autoshard.errors import InfeasibleError, UsageError, UserError
from autoshard.formulation.cost_breakdown import Split
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import MeshTried, Plan
from autoshard.search.memory_fit import fitted
from autoshard.search.objectives import MEMORY, RATIO, SPEED
from autoshard.search.search_request import SearchRequest
from autoshard.search.search_task import Log, SearchTask, SolvedLevel, prepare
from autoshard.search.select_plan import begin, best, marked
from autoshard.solvers.common.solver_options import Options, PartialClock

AXES = {1: ("all",), 2: ("outer", "inner"), 3: ("outer", "middle", "inner")}
FINALISTS = 6  # meshes of which the contenders, too, are simulated
SHARE = 1.5  # of an even part of the time that is left, for one mesh
STYLE_AXES = 2  # batch and tensor axis: known styles are simulated first on meshes of no more
NEAR = 1.15  # times the best figure: what a finalist may be off


@dataclass(frozen=True, eq=False)
class _Tried:
    """A mesh with its optimum, or the reason why there is none."""

    mesh: Mesh
    bound_seconds: float
    outcome: str = ""
    task: SearchTask | None = None
    solved: SolvedLevel | None = None


def meshes(hardware: Hardware, devices: int) -> tuple[Mesh, ...]:
    """Meshes of 1 to 3 axes, outermost first, fewest axes first.

    An axis either stays within a block of devices that a link joins, or covers whole blocks: blocks of 8 and groups
    of 3 consecutive ranks don't go together.
    """
    fitting = []
    for count, names in AXES.items():
        for sizes in _factorisations(devices, count):
            if all(_fits(sizes, link.devices) for link in hardware.links if link.devices < devices):
                fitting.append(Mesh(tuple(zip(names, sizes, strict=True))))
    return tuple(fitting) or (Mesh((("all", devices),)),)


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations, each factor at least 2."""
    if count == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *tail) for tail in _factorisations(number // first, count - 1))


def _fits(sizes: tuple[int, ...], block: int) -> bool:
    """True if the ranks that one coordinate of each axis spans are a divisor or a multiple of the block."""
    spans = [math.prod(sizes[axis:]) for axis in range(len(sizes))]
    return all(span % block == 0 or block % span == 0 for span in spans)


def search_meshes(
    graph: Graph, hardware: Hardware, request: SearchRequest, *, options: Options | None = None, log: Log | None = None
) -> Plan:
    """Best plan on the best mesh of `request.devices`, with all meshes tried; pins are read once for each mesh.

    A mesh is left out once computing alone takes longer there than the best step so far. Raises the error of one mesh
    if there is no plan on any; that is proven only if it is for all.
    """
    assert request.devices is not None, "a mesh is searched for a number of devices"
    check_devices(hardware, request.devices)
    options, log = options or Options(), [] if log is None else log
    tried: list[_Tried] = []
    errors: list[UserError] = []
    candidates, clock = meshes(hardware, request.devices), options.clock
    begun = _begun(candidates, graph, hardware, request, options, log)
    for number, mesh in enumerate(sorted(candidates, key=lambda mesh: _styled(begun.get(mesh)))):
        leader = min((_best_figure(t) for t in tried if t.solved), default=math.inf)
        if clock.over and leader < math.inf:
            tried.append(_Tried(mesh, 0.0, "out of time"))
            continue
        try:
            part = PartialClock(clock.left * SHARE / (len(candidates) - number), whole=clock)
            mesh_options = replace(options, clock=part)
            task = begun.pop(mesh, None) or prepare(graph, mesh, hardware, request, mesh_options, log)
            tried.append(_try(replace(task, options=mesh_options), leader))
            clock.cut |= part.cut
        except (InfeasibleError, UsageError) as error:
            errors.append(error)
            tried.append(
                _Tried(mesh, 0.0, "no plan found that fits" if isinstance(error, InfeasibleError) else "not possible")
            )
    if not any(t.solved for t in tried):
        raise _of_others(of_all_meshes(errors), len(errors) - 1, request.devices)
    tried.sort(key=lambda t: candidates.index(t.mesh))
    return _chosen(tried, request.level, options)


def _begun(
    candidates: Sequence[Mesh], graph: Graph, hardware: Hardware, request: SearchRequest, options: Options, log: Log
) -> dict[Mesh, SearchTask]:
    """Tasks that simulated known styles on meshes with few enough axes, at any time limit; Ctrl-C skips others."""
    tasks: dict[Mesh, SearchTask] = {}
    for mesh in candidates:
        if len(mesh.axes) > STYLE_AXES or (tasks and options.clock.stopped):
            break
        with contextlib.suppress(InfeasibleError, UsageError):  # said where the mesh is searched
            tasks[mesh] = prepare(graph, mesh, hardware, request, options, log)
            begin(tasks[mesh])
    return tasks


def _styled(task: SearchTask | None) -> tuple[float, float]:
    """Rank of the best style that fits, infinite if there is none."""
    best = task.best_style() if task is not None else None
    return task.rank(best) if task is not None and best is not None else (math.inf, math.inf)


def _best_figure(tried: _Tried) -> float:
    """Upper bound of the mesh's figure: as found, or as the best known style."""
    assert tried.solved is not None and tried.task is not None
    return min(_figure(tried.solved, tried.task.level), _styled(tried.task)[0])


def of_all_meshes(errors: Sequence[UserError]) -> UserError:
    """Last error of several meshes, none of which has a plan; proven only if it is for all meshes."""
    last = errors[-1]
    infeasible = [error for error in errors if isinstance(error, InfeasibleError)]
    open_ = [error for error in infeasible if not error.proven]
    return open_[-1] if open_ else infeasible[-1] if infeasible else last


def _of_others(error: UserError, others: int, devices: int) -> UserError:
    """`error` of one mesh, with the note that the `others` have no plan either."""
    if not others or not isinstance(error, InfeasibleError):
        return error
    message = (
        f"{error.message}; nor {'is' if error.proven else 'was'} there one on {others} other mesh{'es' * (others > 1)}"
    )
    return InfeasibleError(f"{message} of {devices} devices", error.hint, proven=error.proven)


def _try(task: SearchTask, leader: float) -> _Tried:
    mesh, bound = task.formulation.mesh, compute_bound(task)
    if task.level == SPEED and bound >= leader:  # a bound on the step
        return _Tried(mesh, bound, "not faster, by its bound")
    return _Tried(mesh, bound, "", *fitted(task))


def compute_bound(task: SearchTask) -> float:
    """Lower bound in seconds on any step on this mesh: every operator computed in its quickest way, nothing moved."""
    split, sites = Split(task.formulation), task.formulation.sites
    return sum(float(split.seconds(n)[0].min()) for n, site in enumerate(sites) if site.kind == "op")


def _figure(result: SolvedLevel, level: int) -> float:
    """Figure that meshes are compared by: what the level minimises; for the peak and the step, the program's."""
    if level == RATIO:
        return result.levelled.objective
    return result.plan.predicted_peak_bytes if level == MEMORY else result.plan.predicted_seconds


def _chosen(tried: list[_Tried], level: int, options: Options) -> Plan:
    """Simulates the contenders of the best few meshes, and keeps the best plan."""
    done = sorted((t for t in tried if t.solved), key=_best_figure)
    limit = NEAR * _best_figure(done[0])
    plans: dict[Mesh, Plan] = {}
    for t in done[:FINALISTS]:
        if t is done[0] or (_best_figure(t) <= limit and not options.clock.over):
            assert t.task is not None
            task = replace(t.task, options=options)
            plans[t.mesh] = best(task, _present(t.solved))
    winner = min(plans.values(), key=lambda plan: _plan_figure(plan, level))
    rows = [_row(t, plans, winner, level) for t in tried]
    order = sorted(rows, key=lambda row: (row.predicted_seconds == 0.0, row.predicted_seconds))
    return marked(replace(winner, search=replace(winner.search, meshes=tuple(order))), options.clock.cut)


def _plan_figure(plan: Plan, level: int) -> float:
    if level == RATIO:
        return plan.certificate.level_objective
    return plan.predicted_peak_bytes if level == MEMORY else plan.predicted_seconds


def _row(tried: _Tried, plans: dict[Mesh, Plan], winner: Plan, level: int) -> MeshTried:
    if tried.solved is None:
        return MeshTried(tried.mesh, tried.outcome, tried.bound_seconds)
    plan = plans.get(tried.mesh, tried.solved.plan)
    slower = level == SPEED and plan.predicted_seconds > winner.predicted_seconds
    outcome = "chosen" if tried.mesh == winner.mesh else "slower" if slower else "not better"
    return MeshTried(tried.mesh, outcome, tried.bound_seconds, plan.predicted_seconds, plan.predicted_peak_bytes)


def _present(result: SolvedLevel | None) -> SolvedLevel:
    assert result is not None
    return result
