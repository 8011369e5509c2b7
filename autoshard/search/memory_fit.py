"""Best plan of one level on one mesh whose program fits: the memory limit around the solver."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from autoshard.cluster.hardware import mixed_precision, parse_hardware
from autoshard.errors import InfeasibleError
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.search.min_memory import least
from autoshard.search.objectives import MEMORY, SPEED, Levelled, solve_level
from autoshard.search.search_task import SearchTask, SolvedLevel, candidate, timed
from autoshard.solvers.common.clock import attempt, watched
from autoshard.solvers.common.effort import LOOSE, ROUNDS
from autoshard.solvers.common.result import OPTIMAL, fits, within_wider
from autoshard.styles.known_styles import STYLES
from autoshard.units import format_bytes, format_seconds

TIGHTER = 1 - LOOSE  # than by proportion
NEAR = 0.03  # relative: limits that give the same plan; what is left of one is not worth another search


def fitted(task: SearchTask) -> tuple[SearchTask, SolvedLevel]:
    """Solver's optimum whose program fits, and its search: with tables in host memory, if none fits without.

    Raises InfeasibleError with the known reasons why none fits.
    """
    try:
        return task, _explained_fit(task)
    except InfeasibleError:
        other = task.with_hosts()
        if other is None:
            raise
    return other, _explained_fit(other)


def _explained_fit(task: SearchTask) -> SolvedLevel:
    try:
        with watched(task.clock):  # the bound on memory too
            return _fitted(task)
    except InfeasibleError as error:
        styled = None if error.proven else _styled(task)
        if styled is not None:
            return styled
        raise _explained(error, task) from error


def _styled(task: SearchTask) -> SolvedLevel | None:
    """Best known style that fits, if the search itself found no plan."""
    best = task.best_style()
    if best is None:
        return None
    name, choice = next((name, choice) for name, choice in task.known_styles() if task.styles.get(name) == best)
    levelled = task.levelled(choice, task.solver, cut=task.clock.cut)
    plan = task.plan(levelled.solution)
    return SolvedLevel(levelled, plan, task.memory_limit_bytes, (candidate(STYLES[name].title, plan, ""),))


def _fitted(task: SearchTask) -> SolvedLevel:
    """Plan solved without the limit first, then with it, tightened if the program exceeds the solver's estimate."""
    if task.level == MEMORY:
        return least(task, ())
    free, name = _by_step(task) or _by_sum(task)
    plan = task.plan(free.solution)
    if task.by_step and not task.holds(plan):
        other, other_name = _by_sum(task)
        of_other = task.plan(other.solution)
        if of_other.predicted_seconds <= plan.predicted_seconds:
            free, name, plan = other, other_name, of_other
    if task.holds(plan):
        return SolvedLevel(free, plan, task.memory_limit_bytes, (candidate(name, plan, ""),))
    first = candidate("without the memory limit", plan, "too large")
    target, quickly = task.memory_limit_bytes, task.solver == "auto"
    for round_ in range(ROUNDS):
        try:
            levelled = solve_level(task.formulation, task.level, target, task.solve, task.stopped, quickly)
        except InfeasibleError:
            break
        plan = task.plan(levelled.solution)
        if task.holds(plan):
            if round_:  # what was proved within a tighter limit is not said of this one
                levelled = task.levelled(levelled.solution.choice, levelled.solution.solver, cut=levelled.cut)
            return SolvedLevel(
                levelled, plan, target, (first, candidate(f"{named(levelled)} within the limit", plan, ""))
            )
        target = (
            min(target, levelled.solution.peak_bytes) * task.memory_limit_bytes / plan.predicted_peak_bytes * TIGHTER
        )
    return least(task, (first,))


def _by_step(task: SearchTask) -> tuple[Levelled, str] | None:
    """Plan with the least estimated step, without the limit, and its name."""
    if not task.by_step:
        return None
    steps = task.steps
    with timed(task.log, "solving for the step"):
        choice = attempt(steps.first)
    if choice is None:
        return None
    return task.levelled(choice, task.solver), next(name for name, other in steps.plans if other == choice)


def _by_sum(task: SearchTask) -> tuple[Levelled, str]:
    """Plan of the least sum of costs, without the limit, and its name."""
    quickly = task.solver == "auto"
    free = solve_level(task.formulation, task.level, float("inf"), task.solve, task.stopped, quickly)
    return free, named(free)


def named(levelled: Levelled) -> str:
    """Name of a solver's plan: the optimum only if that is proved."""
    return "optimum" if levelled.status == OPTIMAL else "best found"


def _explained(error: InfeasibleError, task: SearchTask) -> InfeasibleError:
    """Error with the reason in the model's words, the limit, the largest tensors if it names none, and the pins."""
    graph = task.formulation.graph
    paths = {stored.tensor: stored.path for stored in (*graph.parameters, *graph.buffers)}
    message = re.sub(r"\w+", lambda word: paths.get(word[0], word[0]), error.message)
    message += f"; the limit is {format_bytes(task.memory_limit_bytes)} a device"
    if not any(path in message for path in paths.values()):
        message += f"; the largest tensors, unsplit: {', '.join(_largest(graph))}"
    if task.pins:
        message += f"; pinned: {', '.join(map(str, task.pins))}"
    return InfeasibleError(message, _hint(task), proven=error.proven)


def _hint(task: SearchTask) -> str:
    """Suggestions for using less memory, of those not already taken."""
    graph, mixed = task.formulation.graph, mixed_precision(task.formulation.hardware)
    ways = ["more devices"]
    ways += [f"--precision {mixed}"] if graph.precision != mixed else []
    ways += ["--optimizer sgd"] if graph.optimizer == "adamw" else []
    ways += ["a smaller batch"] + (["fewer pins"] if task.pins else [])
    return ", ".join(ways[:-1]) + f" or {ways[-1]}"


def _largest(graph: Graph, count: int = 5) -> list[str]:
    names = {p.tensor: p.path for p in graph.parameters}
    largest = sorted(graph.tensors, key=lambda tensor: (-tensor.bytes, tensor.name))[:count]
    return [f"{names.get(t.name, t.name)} {list(t.shape)} {format_bytes(t.bytes)}" for t in largest]


# --- of a whole step ------------------------------------------------------------------------------------------------


def fitting_step(
    searched: Callable[[float], Plan], completed: Callable[[Plan], Plan], limit_bytes: float, start_bytes: float
) -> Plan:
    """Fastest plan found whose whole step fits: stages, micro-batches and recomputation change memory.

    `searched` gives the best plan within so many bytes of a micro-batch on one stage, `start_bytes` at first;
    `completed` adds the step. InfeasibleError where none is found, which proves nothing.
    """
    target, first = start_bytes, None
    fitting: list[Plan] = []
    large: list[Plan] = []
    for _ in range(ROUNDS):
        try:
            plan = completed(searched(target))
        except InfeasibleError:
            if first is None:
                raise
            break
        first = first or plan
        if not fits(plan.peak_within(limit_bytes), limit_bytes):
            large.append(plan)
        else:
            fitting.append(plan)
            if plan is first or plan.peak_within(limit_bytes) >= (1 - NEAR) * limit_bytes:
                break
        high = large[-1].predicted_peak_bytes
        if fitting and high - target <= NEAR * high:
            break
        target = (fitting[-1].predicted_peak_bytes + high) / 2 if fitting else _tighter(large, limit_bytes)
    if first is None or not fitting:
        leanest = min(large, key=lambda plan: plan.peak_within(limit_bytes))
        raise no_step_within(limit_bytes, leanest.peak_within(limit_bytes), leanest)
    best = min(fitting, key=lambda plan: plan.step.predicted_seconds or plan.predicted_seconds)
    best = replace(best, capacity_bytes=limit_bytes)
    return best if fitting[0] is first else _within(best, first)


def _tighter(large: Sequence[Plan], limit_bytes: float) -> float:
    """Limit of a micro-batch: on the line through the last two that were too large, by proportion if there is one."""
    sizes, peaks = ([key(plan) for plan in large] for key in (_micro_batch_bytes, lambda p: p.peak_within(limit_bytes)))
    size, peak = sizes[-1], peaks[-1]
    pairs = zip(sizes, peaks, strict=True)
    slopes = [(before - peak) / (larger - size) for larger, before in pairs if larger > size and before > peak]
    estimate = size - (peak - limit_bytes) / slopes[-1] if slopes else size * limit_bytes / peak
    return estimate * TIGHTER if estimate > 0 else size * limit_bytes / peak


def _micro_batch_bytes(plan: Plan) -> float:
    return plan.predicted_peak_bytes


def _within(plan: Plan, first: Plan) -> Plan:
    """Plan without claims proved only within a tighter limit than the user's."""
    certificate = within_wider(plan.certificate, plan.search.level == SPEED)  # the bound on the step leaves memory out
    seconds, size = first.step.predicted_seconds, first.step.predicted_peak_bytes
    message = (
        f"without the memory limit a step takes {format_seconds(seconds, 3)}, and {format_bytes(size, 3)} a device"
    )
    return replace(plan, certificate=certificate, search=replace(plan.search, notes=(message,)))


def no_step_within(limit_bytes: float, least_bytes: float, leanest: Plan) -> InfeasibleError:
    """InfeasibleError for this limit. `leanest`: the tried step that needs least, `least_bytes`."""
    message = f"no plan was found whose step fits in {format_bytes(limit_bytes)} a device: the smallest tried needs "
    step, mixed = leanest.step, mixed_precision(parse_hardware(leanest.hardware_text))
    ways = [f"--stages {2 * step.stages}"]
    ways += ["--recompute full"] * (step.recompute == () or any(policy.keep != "input" for policy in step.recompute))
    ways += [f"--precision {mixed}"] * (leanest.precision != mixed)
    hint = " or ".join(ways) + ", or more devices, or a model with a smaller batch"
    return InfeasibleError(message + format_bytes(least_bytes), hint, proven=False)
