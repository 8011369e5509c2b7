"""What stands around one solve: pins, the level, the memory limit, and the simulation of the best few plans.

`search` gives the best plan, `megatron_plan` the best one of a fixed style.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from autoshard import solvers
from autoshard.contenders import Choice, contenders
from autoshard.errors import InfeasibleError
from autoshard.formulate import Allowed, Formulation, formulate
from autoshard.graph.model import Graph
from autoshard.hardware import Hardware, check_mesh, check_precision
from autoshard.levels import MEMORY, RATIO, SPEED, Levelled, level_value, solve_level
from autoshard.mesh import Mesh
from autoshard.parts import parts
from autoshard.pinned import pinned
from autoshard.pins import Pin
from autoshard.plan import Candidate, Plan, Search
from autoshard.plan_of import Origin, plan_of, priced, with_parts
from autoshard.problem import Problem, Solution, objective
from autoshard.solvers.options import Options
from autoshard.solvers.result import TOLERANCE, peak
from autoshard.styles import megatron
from autoshard.units import format_bytes, format_seconds

MEMORY_ROUNDS = 4  # how often the solver's limit is tightened when the simulated program needs more than it said
Log = list[tuple[str, float]]  # (what was done, wall seconds)


@dataclass(frozen=True)
class Wishes:
    """What is asked of a search, beside model, mesh and machine. `memory_limit_bytes` None: what the profile allows."""

    solver: str = "dp"
    level: int = SPEED
    memory_limit_bytes: float | None = None
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True, eq=False)
class _Task:
    """One search on one mesh, formulated."""

    formulation: Formulation
    wishes: Wishes
    limit_bytes: float
    origin: Origin
    decided_by: str
    fixed: frozenset[int]  # nodes that a pin decided about
    options: Options
    log: Log

    def solve(self, problem: Problem) -> Solution:
        with timed(self.log, f"solving ({self.wishes.solver})"):
            return solvers.solve(problem, self.wishes.solver, self.options)

    def plan(self, solution: Solution) -> Plan:
        """The plan of a solution, with the step and peak of its program."""
        with timed(self.log, "simulating"):
            graph, hardware = self.formulation.graph, self.formulation.hardware
            plan = plan_of(self.formulation, solution, self.origin, self.limit_bytes, self.decided_by, self.fixed)
            return priced(plan, graph, hardware)


@dataclass(frozen=True, eq=False)
class _Found:
    """A solved level with its plan. `target_bytes`: the solver's limit; `candidates`: what was simulated before."""

    levelled: Levelled
    plan: Plan
    target_bytes: float
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()


def search(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    solver: str = "dp",
    level: int = SPEED,
    memory_limit_bytes: float | None = None,
    pins: Sequence[Pin] = (),
    origin: Origin | None = None,
    allowed: Allowed | None = None,
    decided_by: str = "search",
    options: Options | None = None,
    log: Log | None = None,
) -> Plan:
    """The best plan of the level that fits. `log` is given what took how long.

    Raises InfeasibleError where no plan fits, UsageError where a pin is not offered.
    """
    check_mesh(hardware, mesh)
    check_precision(hardware, graph.precision)
    limit = memory_limit_bytes or hardware.usable_memory_bytes
    log = [] if log is None else log
    with timed(log, f"formulating {mesh}"):
        fixed = pinned(formulate(graph, mesh, hardware, limit, allowed), pins)
    wishes = Wishes(solver, level, limit, tuple(pins))
    own = origin or Origin(graph.source)
    options = options or Options()
    return _best(_Task(fixed.formulation, wishes, limit, own, decided_by, fixed.nodes, options, log))


def megatron_plan(graph: Graph, mesh: Mesh, hardware: Hardware, *, origin: Origin | None = None) -> Plan:
    """The best plan in Megatron's style: the last axis splits heads, hidden and vocabulary, the others the batch.

    Shoeybi et al. 2019, arXiv:1909.08053: column-parallel then row-parallel linears, heads split, vocabulary split.
    """
    return search(graph, mesh, hardware, origin=origin, allowed=megatron, decided_by="megatron")


@contextmanager
def timed(log: Log, what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    log.append((what, time.perf_counter() - started))


def _best(task: _Task) -> Plan:
    try:
        found = _fitting(task)
    except InfeasibleError as error:
        raise _explained(error, task) from error
    found = _simulated(task, found)
    choice = found.levelled.solution.choice
    plan = with_parts(found.plan, task.formulation, parts(task.formulation, choice))
    record = Search(
        task.wishes.level,
        tuple(map(str, task.wishes.pins)),
        found.candidates,
        notes=found.notes,
        cut_short=task.options.clock.over,
    )
    certificate = replace(plan.certificate, level_objective=found.levelled.objective, level_bound=found.levelled.bound)
    return replace(plan, certificate=certificate, search=record)


def _fitting(task: _Task) -> _Found:
    """The solver's optimum whose program fits: without the limit first, then with it, tightened where need be."""
    if task.wishes.level == MEMORY:
        return _smallest(task, ())
    free = solve_level(task.formulation, task.wishes.level, float("inf"), task.solve)
    plan = task.plan(free.solution)
    if plan.predicted_peak_bytes <= task.limit_bytes:
        return _Found(free, plan, task.limit_bytes, (_candidate("optimum", plan, ""),))
    first = _candidate("without the memory limit", plan, "too large")
    target = task.limit_bytes
    for attempt in range(MEMORY_ROUNDS):
        try:
            levelled = solve_level(task.formulation, task.wishes.level, target, task.solve)
        except InfeasibleError:
            if not attempt:
                raise
            break
        plan = task.plan(levelled.solution)
        if plan.predicted_peak_bytes <= task.limit_bytes:
            proven = levelled if not attempt else _bounded(levelled, free)
            return _Found(proven, plan, target, (first, _candidate("optimum within the limit", plan, "")))
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


def _smallest(task: _Task, before: tuple[Candidate, ...]) -> _Found:
    """The plan of least memory; InfeasibleError where its program does not fit either."""
    levelled = solve_level(task.formulation, MEMORY, task.limit_bytes, task.solve)
    plan = task.plan(levelled.solution)
    if plan.predicted_peak_bytes > task.limit_bytes:
        raise InfeasibleError(
            "no plan found that fits, which is not proven: the program of the smallest plan found needs "
            f"{format_bytes(plan.predicted_peak_bytes)}"
        )
    return _Found(levelled, plan, levelled.solution.peak_bytes, (*before, _candidate("least memory", plan, "")))


def _candidate(name: str, plan: Plan, outcome: str) -> Candidate:
    return Candidate(
        name, outcome, plan.certificate.objective_seconds, plan.predicted_seconds, plan.predicted_peak_bytes
    )


def _simulated(task: _Task, found: _Found) -> _Found:
    """Simulates the contenders, too, and keeps the program that fits and is best by the level."""
    best = found.levelled.solution
    plans: dict[Choice, tuple[str, Plan]] = {best.choice: (found.candidates[-1].name, found.plan)}
    for name, choice in _others(task, found):
        if choice not in plans:
            plans[choice] = (name, task.plan(_alternative(task, best, choice)))
        if task.options.clock.over:
            break
    fitting = [c for c, (_, plan) in plans.items() if plan.predicted_peak_bytes <= task.limit_bytes]
    winner = min(fitting, key=lambda c: _rank(task, plans[c][1]))
    rows = [_candidate(name, plan, _outcome(task, c, winner, plan)) for c, (name, plan) in plans.items()]
    levelled = found.levelled
    if winner != best.choice:
        solution = _alternative(task, best, winner)
        levelled = replace(
            levelled, solution=solution, objective=level_value(task.formulation, task.wishes.level, solution)
        )
    notes = _slower(found.candidates[0], plans[winner][1]) if len(found.candidates) > 1 else ()
    kept = (*found.candidates[:-1], *rows)
    return replace(found, levelled=levelled, plan=plans[winner][1], candidates=kept, notes=notes)


def _others(task: _Task, found: _Found) -> Iterator[tuple[str, Choice]]:
    """What is simulated beside the optimum: nothing at level 0, which is not about the simulated step."""
    if task.wishes.level == RATIO or task.wishes.solver == "propagation":
        return
    best = found.levelled.solution.choice
    if task.wishes.level == MEMORY:
        yield "optimum", task.solve(replace(task.formulation.problem, capacity_bytes=float("inf"))).choice
    capacity = found.target_bytes if task.wishes.level == SPEED else float("inf")
    yield from contenders(task.formulation, best, parts(task.formulation, best), capacity, task.solve)


def _rank(task: _Task, plan: Plan) -> tuple[float, float]:
    """Smaller is better."""
    seconds, size = plan.predicted_seconds, plan.predicted_peak_bytes
    return (size, seconds) if task.wishes.level == MEMORY else (seconds, size)


def _outcome(task: _Task, choice: Choice, winner: Choice, plan: Plan) -> str:
    if choice == winner:
        return "chosen"
    return "not better" if plan.predicted_peak_bytes <= task.limit_bytes else "too large"


def _alternative(task: _Task, best: Solution, choice: Choice) -> Solution:
    """`choice` as a solution, with the bound that was proved for the optimum."""
    problem = task.formulation.problem
    seconds = objective(problem, choice)
    same = seconds <= best.objective
    return replace(
        best,
        choice=choice,
        objective=seconds,
        peak_bytes=peak(problem, choice),
        status=best.status if same else "feasible",
    )


def _slower(free: Candidate, plan: Plan) -> tuple[str, ...]:
    """That the memory limit costs time, where it does."""
    over = format_bytes(free.predicted_peak_bytes - plan.capacity_bytes, 3)
    extra = plan.predicted_seconds - free.predicted_seconds
    told = f"{format_seconds(extra, 3)} ({extra / free.predicted_seconds:.1%}) slower" if extra > 0 else "no slower"
    return (f"the fastest plan needs {over} more than the memory limit; this one fits and is {told}",)


def _explained(error: InfeasibleError, task: _Task) -> InfeasibleError:
    """The reason with the limit, the largest tensors and the pins."""
    limit, names = format_bytes(task.limit_bytes), ", ".join(_largest(task.formulation.graph))
    message = f"{error.message}; the limit is {limit} a device; the largest tensors, unsplit: {names}"
    if task.wishes.pins:
        message += f"; pinned: {', '.join(map(str, task.wishes.pins))}"
    hint = "more devices, --precision bf16-mixed, --optimizer sgd, or a smaller batch"
    return InfeasibleError(message, hint + (", or fewer pins" if task.wishes.pins else ""))


def _largest(graph: Graph, count: int = 5) -> list[str]:
    names = {p.tensor: p.path for p in graph.parameters}
    largest = sorted(graph.tensors, key=lambda tensor: (-tensor.bytes, tensor.name))[:count]
    return [f"{names.get(t.name, t.name)} {list(t.shape)} {format_bytes(t.bytes)}" for t in largest]
