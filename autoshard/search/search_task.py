"""One search on one mesh: the request, the problem, and a solution with its plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from autoshard import solvers
from autoshard.cluster.hardware import Hardware, check_mesh, check_precision
from autoshard.constraints.apply_pins import pinned, pinned_nodes
from autoshard.constraints.host_offers import offered
from autoshard.constraints.pins import Pin, graph_pins
from autoshard.formulation.formulate import Formulation
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Candidate, Plan
from autoshard.ir.problem import Problem
from autoshard.rules.host_tables import host_tables
from autoshard.search.build_plan import plan_of, priced
from autoshard.search.cached.search_cache import Figures, SearchCache, answers_of, formulated
from autoshard.search.cached.step_cache import StepCache
from autoshard.search.objectives import MEMORY, RATIO, SPEED, Levelled, level_value, ratio_problem
from autoshard.search.search_request import SearchRequest, micro_batches
from autoshard.search.shortest_step import StepSearch
from autoshard.search.style_plans import style_choices
from autoshard.solvers.common.effort import SHARE
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.result import Solution, fits, peak
from autoshard.solvers.common.seen_plans import SeenPlans
from autoshard.solvers.common.solver_options import Clock, Options, PartialClock
from autoshard.styles.known_styles import STYLES, in_style

Log = list[tuple[str, float]]  # (what was done, wall seconds)


@dataclass(frozen=True, eq=False)
class SearchTask:
    """One search on one mesh, formulated. `log` receives the time of each part; the clock is in `options`.

    `styles`: for each known style that was simulated, the figures of its program.
    """

    formulation: Formulation
    request: SearchRequest
    options: Options
    memory_limit_bytes: float
    pins: tuple[Pin, ...]
    fixed: frozenset[int]  # nodes that a pin decided about
    log: Log
    answers: SearchCache = field(default_factory=lambda: SearchCache(None, ""))
    seen: SeenPlans = field(default_factory=SeenPlans)
    styles: dict[str, Figures] = field(default_factory=dict)

    @property
    def solver(self) -> str:
        return self.request.solver_name

    @property
    def level(self) -> int:
        return self.request.level

    @property
    def clock(self) -> Clock:
        return self.options.clock

    def quickly(self, problem: Problem) -> Solution:
        """Solution of a quick solver, whichever was asked for: for plans that need no bound of their own."""
        if self.solver == "recursive":
            return self.solve(problem)
        with timed(self.log, "solving (auto) for more plans to simulate"):
            solution = solvers.solve(problem, "auto", replace(self.options, rough=True))
        self.seen.add(problem, solution)
        return solution

    def solve(self, problem: Problem) -> Solution:
        """Solution within a part of the time that is left: it is still to be simulated, with others."""
        whole = self.clock
        part = PartialClock(SHARE * whole.left, whole=whole)
        options = replace(self.options, pinned=self.starts(problem), clock=part)
        with timed(self.log, f"solving ({self.solver})"):
            solution = solvers.solve(problem, self.solver, options)
        whole.cut |= solution.cut
        self.seen.add(problem, solution)
        return solution

    def levelled(self, choice: Choice, solver: str, *, cut: bool = False, least_bytes: float = 0.0) -> Levelled:
        """Choice, whoever found it, with the facts about every plan within the limit (and within its own memory).

        `least_bytes`: the bound on memory that level 1 found.
        """
        formulation, level = self.formulation, self.level
        problem = formulation.problem
        known = max(self.memory_limit_bytes, peak(problem, choice))
        in_seconds = self.seen.bound(problem, known) if level == SPEED else 0.0
        solution = Solution(problem, tuple(choice), in_seconds, solver, cut=cut)
        self.seen.add(replace(problem, capacity_bytes=known), solution)
        if level == SPEED:
            return Levelled(solution, solution.objective, solution.lower_bound, solution.cut)
        bound = self.seen.bound(ratio_problem(formulation), known) if level == RATIO else least_bytes
        return Levelled(solution, level_value(formulation, level, choice), bound, cut)

    @cached_property
    def steps(self) -> StepCache:
        """Cache of plans by their step, and of the bound on it."""
        return StepCache(self.formulation, self.clock, self.answers, self._step_search)

    def _step_search(self) -> StepSearch:
        with timed(self.log, "resources of a step"):
            return StepSearch(self.formulation, self.clock, fused=bool(self.request.fuse))

    @property
    def by_step(self) -> bool:
        """True if plans are found by their step: at level 2, if no other solver is asked for."""
        return self.level == SPEED and self.solver == "auto"

    @property
    def takes_styles(self) -> bool:
        """True if plans of known styles may be taken: nothing narrows the choices, and no other solver is asked for."""
        return self.solver == "auto" and not self.pins and self.request.strategy not in STYLES

    def known_styles(self) -> list[tuple[str, Choice]]:
        """(name of a style, its least choice in a row), whatever its memory."""
        return self.steps.styles(partial(style_choices, self.formulation))

    def best_style(self) -> Figures | None:
        """Figures of the best style by the level, of those simulated that fit."""
        fitting = [figures for figures in self.styles.values() if self.holds(figures)]
        return min(fitting, key=self.rank, default=None)

    def rank(self, program: Plan | Figures) -> tuple[float, float]:
        """Key of a program, smaller is better."""
        seconds, size = program.predicted_seconds, program.predicted_peak_bytes
        return (size, seconds) if self.level == MEMORY else (seconds, size)

    def with_hosts(self) -> SearchTask | None:
        """Task with every table that can in host memory; None if that is no other search."""
        context = self.formulation.context
        every = frozenset(host_tables(context.graph))
        if context.hardware.host is None or every <= context.on_host:
            return None
        return prepare(context.graph, context.mesh, context.hardware, self.request, self.options, self.log, every)

    def holds(self, plan: Plan | Figures) -> bool:
        """True if its program fits the memory limit."""
        return fits(plan.predicted_peak_bytes, self.memory_limit_bytes)

    def stopped(self) -> bool:
        return self.clock.over

    def starts(self, problem: Problem) -> dict[int, int]:
        """Start of propagation: the pinned nodes, each at the cheapest choice that its pin leaves."""
        if self.solver != "propagation":
            return {}
        return {n: int(problem.nodes[n].seconds.argmin()) for n in self.fixed}

    def figures(self, solution: Solution) -> Figures:
        """Step and peak of its program, which is made if they are not known."""
        with timed(self.log, "simulating"):

            def simulated() -> Figures:
                plan = priced(self._plan_of(solution), self.formulation.graph, self.formulation.hardware)
                return Figures(plan.predicted_seconds, plan.predicted_peak_bytes)

            return self.answers.figures(solution.choice, self.request.fuse, simulated)

    def plan(self, solution: Solution) -> Plan:
        """Plan of a solution, with the step and peak of its program."""
        seconds, size = self.figures(solution)
        return replace(self._plan_of(solution), predicted_seconds=seconds, predicted_peak_bytes=size)

    def _plan_of(self, solution: Solution) -> Plan:
        style = self.request.strategy if self.request.strategy in STYLES else "search"
        by = "propagated" if self.solver == "propagation" else style
        origin = self.request.origin_of(self.formulation.graph)
        return plan_of(self.formulation, solution, origin, self.memory_limit_bytes, by, self.fixed)


@dataclass(frozen=True, eq=False)
class SolvedLevel:
    """A solved level with its plan. `target_bytes`: the solver's limit; `candidates`: what was simulated before."""

    levelled: Levelled
    plan: Plan
    target_bytes: float
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()


def prepare(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    request: SearchRequest,
    options: Options | None = None,
    log: Log | None = None,
    on_host: frozenset[str] = frozenset(),
) -> SearchTask:
    """Problem on one mesh, style and pins applied. `on_host`: tables that may lie in host memory, with those that pins
    or a device's memory ask for.

    Raises UsageError if the mesh, the precision or a pin can't be, InfeasibleError if the style can't.
    """
    check_mesh(hardware, mesh)
    check_precision(hardware, graph.precision)
    log, pins = [] if log is None else log, (*graph_pins(graph, mesh), *request.pins_on(mesh))
    limit = hardware.usable_memory_bytes if request.memory_limit_bytes is None else request.memory_limit_bytes
    with timed(log, f"formulating {mesh}"):
        context = PlanningContext(graph, mesh, hardware, request.all_to_all, micro_batches(graph, request))
        whole = formulated(request.cache, context).within(limit)
        if on_host := on_host | offered(whole, pins, limit):
            context = replace(context, on_host=on_host)
            whole = formulated(request.cache, context).within(limit)
        if request.strategy in STYLES:  # for all that no pin decides
            whole = in_style(whole, request.strategy, pinned_nodes(whole, pins))
        fixed = pinned(whole, pins)
    answers = answers_of(request.cache, context, request.strategy, pins, request.fuse)
    options = options or Options()
    return SearchTask(fixed.formulation, request, options, limit, pins, fixed.nodes, log, answers)


@contextmanager
def timed(log: Log, what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    log.append((what, time.perf_counter() - started))


def candidate(name: str, plan: Plan, outcome: str) -> Candidate:
    return Candidate(
        name, outcome, plan.certificate.objective_seconds, plan.predicted_seconds, plan.predicted_peak_bytes
    )
