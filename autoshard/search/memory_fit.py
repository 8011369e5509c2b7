"""The best plan of one level on one mesh whose program fits: the memory limit around the solver."""

from __future__ import annotations

import re

from autoshard.errors import InfeasibleError
from autoshard.ir.graph import Graph
from autoshard.search.min_memory import least
from autoshard.search.objectives import MEMORY, Levelled, solve_level
from autoshard.search.search_task import Found, SearchTask, candidate, timed
from autoshard.solvers.common.clock import attempt, watched
from autoshard.solvers.common.result import OPTIMAL
from autoshard.units import format_bytes

MEMORY_ROUNDS = 4  # how often the solver's limit is tightened when the simulated program needs more than it said


def fitted(task: SearchTask) -> Found:
    """The solver's optimum whose program fits. Raises InfeasibleError with what is known about why none does."""
    try:
        with watched(task.clock):  # the bound on memory too
            return _fitted(task)
    except InfeasibleError as error:
        raise _explained(error, task) from error


def _fitted(task: SearchTask) -> Found:
    """Without the limit first, then with it, tightened where the program needs more than the solver said."""
    if task.level == MEMORY:
        return least(task, ())
    free, name = _by_step(task) or _by_sum(task)
    plan = task.plan(free.solution)
    if task.by_step and plan.predicted_peak_bytes > task.memory_limit_bytes:
        other, other_name = _by_sum(task)
        of_other = task.plan(other.solution)
        if of_other.predicted_seconds <= plan.predicted_seconds:
            free, name, plan = other, other_name, of_other
    if plan.predicted_peak_bytes <= task.memory_limit_bytes:
        return Found(free, plan, task.memory_limit_bytes, (candidate(name, plan, ""),))
    first = candidate("without the memory limit", plan, "too large")
    target = task.memory_limit_bytes
    for round_ in range(MEMORY_ROUNDS):
        try:
            levelled = solve_level(task.formulation, task.level, target, task.solve, task.stopped)
        except InfeasibleError:
            break
        plan = task.plan(levelled.solution)
        if plan.predicted_peak_bytes <= task.memory_limit_bytes:
            if round_:  # what was proved within a tighter limit is not said of this one
                levelled = task.levelled(levelled.solution.choice, levelled.solution.solver, cut=levelled.cut)
            return Found(levelled, plan, target, (first, candidate(f"{named(levelled)} within the limit", plan, "")))
        target = min(target, levelled.solution.peak_bytes) * task.memory_limit_bytes / plan.predicted_peak_bytes * 0.999
    return least(task, (first,))


def _by_step(task: SearchTask) -> tuple[Levelled, str] | None:
    """The plan that takes least by the estimate of a step, without the limit, and its name."""
    if not task.by_step:
        return None
    steps = task.steps
    with timed(task.log, "solving for the step"):
        choice = attempt(steps.first)
    if choice is None:
        return None
    return task.levelled(choice, task.solver), next(name for name, own in steps.found if own == choice)


def _by_sum(task: SearchTask) -> tuple[Levelled, str]:
    """The plan of the least sum of costs, without the limit, and its name."""
    free = solve_level(task.formulation, task.level, float("inf"), task.solve, task.stopped)
    return free, named(free)


def named(levelled: Levelled) -> str:
    """What a solver's plan is called: the optimum only where that is proved."""
    return "optimum" if levelled.status == OPTIMAL else "best found"


def _explained(error: InfeasibleError, task: SearchTask) -> InfeasibleError:
    """The reason in the model's words, with the limit, the largest tensors where it names none, and the pins."""
    graph = task.formulation.graph
    paths = {stored.tensor: stored.path for stored in (*graph.parameters, *graph.buffers)}
    message = re.sub(r"\w+", lambda word: paths.get(word[0], word[0]), error.message)
    message += f"; the limit is {format_bytes(task.memory_limit_bytes)} a device"
    if not any(path in message for path in paths.values()):
        message += f"; the largest tensors, unsplit: {', '.join(_largest(graph))}"
    if task.pins:
        message += f"; pinned: {', '.join(map(str, task.pins))}"
    hint = "more devices, --precision bf16-mixed, --optimizer sgd, or a smaller batch"
    return InfeasibleError(message, hint + (", or fewer pins" if task.pins else ""), proven=error.proven)


def _largest(graph: Graph, count: int = 5) -> list[str]:
    names = {p.tensor: p.path for p in graph.parameters}
    largest = sorted(graph.tensors, key=lambda tensor: (-tensor.bytes, tensor.name))[:count]
    return [f"{names.get(t.name, t.name)} {list(t.shape)} {format_bytes(t.bytes)}" for t in largest]
