"""The best plan of one level on one mesh whose program fits: the memory limit around the solver."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from autoshard import solvers
from autoshard.errors import InfeasibleError
from autoshard.formulate import Allowed, Formulation, formulate
from autoshard.graph.model import Graph
from autoshard.hardware import Hardware, check_mesh, check_precision
from autoshard.levels import MEMORY, SPEED, Levelled, level_value, solve_level
from autoshard.mesh import Mesh
from autoshard.pinned import pinned
from autoshard.pins import Pin
from autoshard.plan import Candidate, Plan
from autoshard.plan_of import Origin, plan_of, priced
from autoshard.problem import Problem, Solution
from autoshard.solvers.options import Options, Part
from autoshard.solvers.result import TOLERANCE
from autoshard.units import format_bytes

SHARE = 0.5  # of the time that is left, for one solve
MEMORY_ROUNDS = 4  # how often the solver's limit is tightened when the simulated program needs more than it said
Log = list[tuple[str, float]]  # (what was done, wall seconds)


@dataclass(frozen=True, eq=False)
class Wishes:
    """What is asked of a search, beside model, mesh and machine. `memory_limit_bytes` None: what the profile allows.

    `allowed` keeps the strategies of a style, which `decided_by` names. `log` is given what took how long.
    """

    solver: str = "dp"
    level: int = SPEED
    memory_limit_bytes: float | None = None
    pins: tuple[Pin, ...] = ()
    origin: Origin = field(default_factory=Origin)
    allowed: Allowed | None = None
    decided_by: str = "search"
    all_to_all: bool = True
    options: Options = field(default_factory=Options)
    log: Log = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Task:
    """One search on one mesh, formulated."""

    formulation: Formulation
    wishes: Wishes
    limit_bytes: float
    fixed: frozenset[int]  # nodes that a pin decided about

    def quickly(self, problem: Problem) -> Solution:
        """By a solver that is quick, whichever was asked for: for plans that need no bound of their own."""
        if self.wishes.solver == "recursive":
            return self.solve(problem)
        with timed(self.wishes.log, "solving (dp) for more plans to simulate"):
            return solvers.solve(problem, "dp", replace(self.wishes.options, rough=True))

    def solve(self, problem: Problem) -> Solution:
        """Within a part of the time that is left: what is found is still simulated, and others beside it."""
        whole = self.wishes.options.clock
        part = Part(SHARE * whole.left, whole=whole)
        options = replace(self.wishes.options, pinned=self.starts(problem), clock=part)
        with timed(self.wishes.log, f"solving ({self.wishes.solver})"):
            found = solvers.solve(problem, self.wishes.solver, options)
        whole.cut |= part.over or part.cut
        return found

    def stopped(self) -> bool:
        return self.wishes.options.clock.over

    def starts(self, problem: Problem) -> dict[int, int]:
        """Where propagation starts: the pinned nodes, each at the cheapest choice that its pin leaves."""
        if self.wishes.solver != "propagation":
            return {}
        return {n: int(problem.nodes[n].seconds.argmin()) for n in self.fixed}

    def plan(self, solution: Solution) -> Plan:
        """The plan of a solution, with the step and peak of its program."""
        with timed(self.wishes.log, "simulating"):
            graph, hardware = self.formulation.graph, self.formulation.hardware
            wishes = self.wishes
            by = "propagated" if wishes.solver == "propagation" else wishes.decided_by
            plan = plan_of(self.formulation, solution, wishes.origin, self.limit_bytes, by, self.fixed)
            return priced(plan, graph, hardware)


@dataclass(frozen=True, eq=False)
class Found:
    """A solved level with its plan. `target_bytes`: the solver's limit; `candidates`: what was simulated before."""

    levelled: Levelled
    plan: Plan
    target_bytes: float
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()


def prepare(graph: Graph, mesh: Mesh, hardware: Hardware, wishes: Wishes) -> Task:
    """The problem on one mesh, pins applied. Raises UsageError where the mesh, the precision or a pin can't be."""
    check_mesh(hardware, mesh)
    check_precision(hardware, graph.precision)
    limit = wishes.memory_limit_bytes or hardware.usable_memory_bytes
    with timed(wishes.log, f"formulating {mesh}"):
        fixed = pinned(formulate(graph, mesh, hardware, limit, wishes.allowed, wishes.all_to_all), wishes.pins)
    return Task(fixed.formulation, wishes, limit, fixed.nodes)


@contextmanager
def timed(log: Log, what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    log.append((what, time.perf_counter() - started))


def fitted(task: Task) -> Found:
    """The solver's optimum whose program fits. Raises InfeasibleError with what is known about why none does."""
    try:
        return _fitted(task)
    except InfeasibleError as error:
        raise _explained(error, task) from error


def _fitted(task: Task) -> Found:
    """Without the limit first, then with it, tightened where the program needs more than the solver said."""
    if task.wishes.level == MEMORY:
        return _smallest(task, ())
    free = solve_level(task.formulation, task.wishes.level, float("inf"), task.solve, task.stopped)
    plan = task.plan(free.solution)
    if plan.predicted_peak_bytes <= task.limit_bytes:
        return Found(free, plan, task.limit_bytes, (candidate("optimum", plan, ""),))
    first = candidate("without the memory limit", plan, "too large")
    target = task.limit_bytes
    for attempt in range(MEMORY_ROUNDS):
        try:
            levelled = solve_level(task.formulation, task.wishes.level, target, task.solve, task.stopped)
        except InfeasibleError:
            break
        plan = task.plan(levelled.solution)
        if plan.predicted_peak_bytes <= task.limit_bytes:
            proven = levelled if not attempt else _bounded(levelled, free)
            return Found(proven, plan, target, (first, candidate("optimum within the limit", plan, "")))
        target = min(target, levelled.solution.peak_bytes) * task.limit_bytes / plan.predicted_peak_bytes * 0.999
    found = _smallest(task, (first,))
    value = level_value(task.formulation, task.wishes.level, found.levelled.solution)
    return replace(found, levelled=_bounded(replace(found.levelled, objective=value), free))


def _bounded(levelled: Levelled, free: Levelled) -> Levelled:
    """With the bound that holds without a limit: that of a tighter limit than asked for says nothing."""
    closed = levelled.objective <= free.bound * (1 + TOLERANCE)
    bound = levelled.objective if closed else free.bound
    lower = min(free.solution.lower_bound, levelled.solution.objective)
    solution = replace(levelled.solution, lower_bound=lower, status="optimal" if closed else "feasible")
    return Levelled(solution, levelled.objective, bound)


def _smallest(task: Task, before: tuple[Candidate, ...]) -> Found:
    """The plan of least memory; InfeasibleError where its program does not fit either.

    A program may need less than the solver says, which counts a value once for every layout that it is used in.
    """
    refused = None
    try:
        levelled = solve_level(task.formulation, MEMORY, task.limit_bytes, task.solve, task.stopped)
    except InfeasibleError as error:
        refused = error
        levelled = solve_level(task.formulation, MEMORY, float("inf"), task.solve, task.stopped)
    plan = task.plan(levelled.solution)
    if plan.predicted_peak_bytes > task.limit_bytes and refused:
        needs = format_bytes(plan.predicted_peak_bytes)
        raise InfeasibleError(f"{refused.message}; the program of the smallest plan found needs {needs}")
    if plan.predicted_peak_bytes > task.limit_bytes:
        raise InfeasibleError(
            "no plan found that fits, which is not proven: the program of the smallest plan found needs "
            f"{format_bytes(plan.predicted_peak_bytes)}"
        )
    return Found(levelled, plan, levelled.solution.peak_bytes, (*before, candidate("least memory", plan, "")))


def candidate(name: str, plan: Plan, outcome: str) -> Candidate:
    return Candidate(
        name, outcome, plan.certificate.objective_seconds, plan.predicted_seconds, plan.predicted_peak_bytes
    )


def _explained(error: InfeasibleError, task: Task) -> InfeasibleError:
    """The reason in the model's words, with the limit, the largest tensors where it names none, and the pins."""
    graph = task.formulation.graph
    paths = {stored.tensor: stored.path for stored in (*graph.parameters, *graph.buffers)}
    message = re.sub(r"\w+", lambda word: paths.get(word[0], word[0]), error.message)
    message += f"; the limit is {format_bytes(task.limit_bytes)} a device"
    if not any(path in message for path in paths.values()):
        message += f"; the largest tensors, unsplit: {', '.join(_largest(graph))}"
    if task.wishes.pins:
        message += f"; pinned: {', '.join(map(str, task.wishes.pins))}"
    hint = "more devices, --precision bf16-mixed, --optimizer sgd, or a smaller batch"
    return InfeasibleError(message, hint + (", or fewer pins" if task.wishes.pins else ""))


def _largest(graph: Graph, count: int = 5) -> list[str]:
    names = {p.tensor: p.path for p in graph.parameters}
    largest = sorted(graph.tensors, key=lambda tensor: (-tensor.bytes, tensor.name))[:count]
    return [f"{names.get(t.name, t.name)} {list(t.shape)} {format_bytes(t.bytes)}" for t in largest]
