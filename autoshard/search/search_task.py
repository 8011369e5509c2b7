"""One search on one mesh: what is asked of it, the problem, and a solution with its plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from autoshard import solvers
from autoshard.cluster.hardware import Hardware, check_mesh, check_precision
from autoshard.constraints.apply_pins import pinned
from autoshard.constraints.pins import Pin
from autoshard.formulation.formulate import Allowed, Formulation, formulate
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Candidate, Plan
from autoshard.ir.problem import Problem
from autoshard.search.build_plan import Origin, plan_of, priced
from autoshard.search.objectives import RATIO, SPEED, Levelled, level_value, ratio_problem
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.result import Solution, peak
from autoshard.solvers.common.seen_plans import SeenPlans
from autoshard.solvers.common.solver_options import Options, PartialClock

SHARE = 0.5  # of the time that is left, for one solve
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
class SearchTask:
    """One search on one mesh, formulated."""

    formulation: Formulation
    wishes: Wishes
    limit_bytes: float
    fixed: frozenset[int]  # nodes that a pin decided about
    seen: SeenPlans = field(default_factory=SeenPlans)

    def quickly(self, problem: Problem) -> Solution:
        """By a solver that is quick, whichever was asked for: for plans that need no bound of their own."""
        if self.wishes.solver == "recursive":
            return self.solve(problem)
        with timed(self.wishes.log, "solving (dp) for more plans to simulate"):
            found = solvers.solve(problem, "dp", replace(self.wishes.options, rough=True))
        self.seen.add(problem, found)
        return found

    def solve(self, problem: Problem) -> Solution:
        """Within a part of the time that is left: what is found is still simulated, and others beside it."""
        whole = self.wishes.options.clock
        part = PartialClock(SHARE * whole.left, whole=whole)
        options = replace(self.wishes.options, pinned=self.starts(problem), clock=part)
        with timed(self.wishes.log, f"solving ({self.wishes.solver})"):
            found = solvers.solve(problem, self.wishes.solver, options)
        whole.cut |= found.cut
        self.seen.add(problem, found)
        return found

    def levelled(self, choice: Choice, solver: str, *, cut: bool = False, least_bytes: float = 0.0) -> Levelled:
        """A choice, whoever found it, with what is known of every plan within the limit (and within its own memory).

        `least_bytes`: the bound on memory that level 1 found.
        """
        formulation, level = self.formulation, self.wishes.level
        problem = formulation.problem
        known = max(self.limit_bytes, peak(problem, choice))
        in_seconds = self.seen.bound(problem, known) if level == SPEED else 0.0
        solution = Solution(problem, tuple(choice), in_seconds, solver, cut=cut)
        self.seen.add(replace(problem, capacity_bytes=known), solution)
        if level == SPEED:
            return Levelled(solution, solution.objective, solution.lower_bound, solution.cut)
        bound = self.seen.bound(ratio_problem(formulation), known) if level == RATIO else least_bytes
        return Levelled(solution, level_value(formulation, level, choice), bound, cut)

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


def prepare(graph: Graph, mesh: Mesh, hardware: Hardware, wishes: Wishes) -> SearchTask:
    """The problem on one mesh, pins applied. Raises UsageError where the mesh, the precision or a pin can't be."""
    check_mesh(hardware, mesh)
    check_precision(hardware, graph.precision)
    limit = hardware.usable_memory_bytes if wishes.memory_limit_bytes is None else wishes.memory_limit_bytes
    with timed(wishes.log, f"formulating {mesh}"):
        fixed = pinned(formulate(graph, mesh, hardware, limit, wishes.allowed, wishes.all_to_all), wishes.pins)
    return SearchTask(fixed.formulation, wishes, limit, fixed.nodes)


@contextmanager
def timed(log: Log, what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    log.append((what, time.perf_counter() - started))


def candidate(name: str, plan: Plan, outcome: str) -> Candidate:
    return Candidate(
        name, outcome, plan.certificate.objective_seconds, plan.predicted_seconds, plan.predicted_peak_bytes
    )
