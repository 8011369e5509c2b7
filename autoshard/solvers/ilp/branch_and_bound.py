"""Integer programming: the tight relaxation on HiGHS, memory rows where they are violated, then branch and bound.

1. A start from dp with small tables (an upper bound; dp's lower bound is not used, unless the clock ends it all).
2. The relaxation. While its expected bytes overflow the capacity at some time, a row for that time. Often its vertex is
   integral and fits: then it is the optimum.
3. Choices that the reduced costs (`reduced_costs.excess`) put above the best plan known are in no better plan, and go;
   again.
4. Branch and bound on what is left; a solution that overflows at a time without a row gets that row, and again.
The bound is recomputed from the duals, so that no tolerance of HiGHS is in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.ir.problem import Floats, Integers, Problem, memory, objective
from autoshard.solvers.common.clock import Pace, attempt, watched
from autoshard.solvers.common.effort import MOST_ROUNDS
from autoshard.solvers.common.local_search import Aim, Choice, descend, links
from autoshard.solvers.common.memory_repair import repaired
from autoshard.solvers.common.result import Solution, finish, fits, proved, tightened
from autoshard.solvers.common.solver_options import Clock, Options
from autoshard.solvers.ilp import pulp_engine, warm_start
from autoshard.solvers.linear_program.highs_engine import Highs, Relaxed
from autoshard.solvers.linear_program.memory_constraints import MemoryRows, expected, with_prices
from autoshard.solvers.linear_program.reduced_costs import excess
from autoshard.solvers.linear_program.rows import Linear, linear
from autoshard.solvers.relax.memory_columns import PENALTY, condensed
from autoshard.solvers.relax.memory_presolve import infeasible, overflows, starting_plan, worth_keeping
from autoshard.units import ROUNDING

_NODES = 20_000  # of the search tree: a count, so that plans don't depend on the clock
_SMALLER = 0.8  # the part of the choices below which the program is written again without the rest


def solve(problem: Problem, options: Options, *, start: bool = True) -> Solution:
    """The fastest plan within the capacity, with a lower bound. `start`: begin with a plan of dp.

    Raises InfeasibleError where no plan is allowed or fits, UsageError for an engine that there is not.
    """
    if options.engine != "highs":
        return pulp_engine.solve(problem, options)
    started, known = time.perf_counter(), 0.0
    search = _IntegerSearch(condensed(problem), options.clock)
    with watched(options.clock):
        if start:
            choice, known, search.prices = starting_plan(search.problem, options)
            search.offer(choice)
        attempt(search.run)
    if start and search.clock.cut:  # dp's bound may be the better one
        search.offer(search.best or warm_start.plan(problem))
        search.bound = tightened(search.bound, known, search.value)
    best = search.answer()
    return finish(problem, best, search.value if search.exhausted else search.bound, "ilp", started)


@dataclass
class _IntegerSearch:
    """The state of one solve; `problem` is on condensed times. `bound` only rises, `best` only gets better."""

    problem: Problem
    clock: Clock
    bound: float = 0.0
    best: Choice | None = None
    times: list[int] = field(default_factory=list)
    prices: Floats = field(default_factory=lambda: np.zeros(0))
    value: float = math.inf
    exhausted: bool = False

    def answer(self) -> Choice:
        if self.best is not None:
            return self.best
        raise infeasible(self.problem, proven=self.exhausted)

    def offer(self, choice: Choice | None) -> bool:
        """Take a plan if it is allowed, fits and is better; True if it fits."""
        if choice is None or not fits(memory(self.problem, choice).max(initial=0.0), self.problem.capacity_bytes):
            return False
        value = objective(self.problem, choice)
        if value < self.value:
            proved(value, self.bound)
            self.best, self.value = choice, value
        return math.isfinite(value)

    @property
    def closed(self) -> bool:
        return self.exhausted or self.reached(self.bound)

    def run(self) -> None:
        """Relaxes and leaves out choices while that takes many away, then branch and bound."""
        choices = worth_keeping(self.problem)
        if self.prices.any() and self.best is not None and not self.clock.over:
            choices = self.under_prices(choices)
        while not (self.closed or self.clock.over):
            program = _HighsProgram(self, choices, self.times)
            relaxed = program.relax()
            self.times = program.memory.times
            if relaxed is None:
                self.exhausted = program.infeasible
                return
            self.better_than(relaxed.bound)
            self.round(program.model, relaxed)
            fewer = self.within(program.model, excess(program.model, relaxed.reduced), self.value - relaxed.bound)
            if not all(map(len, fewer)):
                self.exhausted = True
            elif size(fewer) > _SMALLER * size(choices) and not self.clock.over:
                self.better_than(program.branch(_NODES, self.bound))
                return
            choices = fewer

    def better_than(self, bound: float) -> None:
        """Raise the bound: nothing better than the best plan is below `bound`; inf where nothing is left."""
        self.exhausted |= math.isinf(bound)
        self.bound = max(self.bound, min(bound, self.value))

    def reached(self, bound: float) -> bool:
        """True if nothing above `bound` is better than the best plan known."""
        return math.isfinite(self.value) and self.value - bound <= ROUNDING * abs(self.value)

    def under_prices(self, choices: list[Integers]) -> list[Integers]:
        """Prunes by a relaxation without memory rows, their prices being in its costs: it is solved much faster."""
        pace, model = Pace(2), linear(self.problem, choices)
        memory_rows = MemoryRows(self.problem, model, len(model.cost))
        times = np.flatnonzero(self.prices)
        priced, paid = with_prices(model, memory_rows.rows(times), self.prices[times] * memory_rows.unit)
        relaxed = Highs(priced, self.clock, self.value, pace).relax()
        if relaxed is None:
            return choices
        bound = relaxed.bound - paid
        self.bound = tightened(self.bound, bound, self.value)
        return self.within(model, excess(model, relaxed.reduced), self.value - bound)

    def round(self, model: Linear, relaxed: Relaxed) -> None:
        """The nearest plan to a fractional one, improved one node at a time."""
        choice = model.picked(relaxed.x)
        if math.isinf(objective(self.problem, choice)):
            return
        penalty = PENALTY * max(relaxed.bound, 1e-30) / max(self.problem.capacity_bytes, 1.0)
        aim = Aim(1.0, 0.0 if math.isinf(self.problem.capacity_bytes) else penalty, self.problem.capacity_bytes)
        near = descend(self.problem, links(self.problem), choice, aim)
        if not self.offer(near):
            self.offer(repaired(self.problem, near))

    def within(self, model: Linear, more: Floats, most: float) -> list[Integers]:
        """The choices that cost at most `most` beyond the bound, and the best plan's own."""
        result = []
        for n, (some, a, b) in enumerate(zip(model.alive, model.first[:-1], model.first[1:], strict=True)):
            stay = more[a:b] <= most * (1 + ROUNDING)
            if self.best is not None:
                stay |= some == self.best[n]
            elif not stay.any():
                stay[np.argmin(more[a:b])] = True
            result.append(some[stay])
        return result


class _HighsProgram:
    """One linear program, with memory rows for `times` at first."""

    def __init__(self, search: _IntegerSearch, choices: Sequence[Integers], times: Sequence[int]) -> None:
        self.search = search
        pace, model = Pace(2), linear(search.problem, choices)
        typical = search.value if search.best else float(model.cost.mean()) * len(choices)
        self.highs = Highs(model, search.clock, typical, pace)
        self.memory = MemoryRows(search.problem, model, len(model.cost))
        self.infeasible = False
        self.limit(times)

    @property
    def model(self) -> Linear:
        return self.highs.model

    def limit(self, times: Sequence[int]) -> None:
        new = [t for t in times if t not in self.memory.times]
        if new:
            self.highs.add(self.memory.rows(new))

    def relax(self) -> Relaxed | None:
        """The relaxation under all the memory rows that it violates; None where it is infeasible or time is out."""
        last = None
        for _ in range(MOST_ROUNDS):
            relaxed = self.highs.relax()
            if relaxed is None:
                self.infeasible = self.highs.infeasible
                return None
            last = relaxed
            if is_integral(relaxed.x[: self.model.choices]):
                self.search.offer(self.model.picked(relaxed.x))
            over = overflows(
                self.search.problem, expected(self.search.problem, self.model, relaxed.x), self.memory.times
            )
            if not over or self.search.reached(relaxed.bound) or self.search.clock.over:
                return last
            self.limit(over)
        return last

    def branch(self, nodes: int, bound: float) -> float:
        """Branch and bound; rows for what its solutions overflow, and again.

        Returns a bound that is at least `bound`; inf where nothing better is left.
        """
        search, model = self.search, self.model
        for _ in range(MOST_ROUNDS):
            searched = self.highs.integer(self.start(), nodes, 0.0)
            bound = max(bound, searched.bound)
            if searched.x is None:
                return math.inf if searched.done else bound
            choice = model.picked(searched.x)
            if search.offer(choice) or search.clock.over:
                return math.inf if search.reached(bound) else bound
            over = overflows(search.problem, memory(search.problem, choice), self.memory.times)
            if over:
                self.limit(over)
            else:
                self.highs.exclude(model.columns_of(choice))
        return bound

    def start(self) -> Integers | None:
        best = self.search.best
        inside = best is not None and all(s in some for s, some in zip(best, self.model.alive, strict=True))
        return self.model.columns_of(best) if best is not None and inside else None


def size(choices: Sequence[Integers]) -> int:
    return sum(map(len, choices))


def is_integral(x: Floats) -> bool:
    return bool((np.minimum(x, 1.0 - x) < 1e-6).all())
