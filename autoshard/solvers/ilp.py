"""Integer programming: the tight relaxation on HiGHS, memory rows where they are violated, then branch and bound.

1. A start from dp with small tables (an upper bound; dp's lower bound is not used, so that the two check each other).
2. The relaxation. While its expected bytes overflow the capacity at some time, a row for that time. Often its vertex is
   integral and fits: then it is the optimum.
3. Choices whose reduced cost lifts the bound above the best plan known are in no better plan, and go.
4. Branch and bound on what is left; a solution that overflows at a time without a row gets that row, and again.
The bound is recomputed from the duals, so that no tolerance of HiGHS is in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.problem import Floats, Integers, Problem, Solution, memory, objective
from autoshard.solvers import pulp_engine
from autoshard.solvers.highs import Highs, Relaxed
from autoshard.solvers.lagrangian import condensed
from autoshard.solvers.linear import Linear, linear
from autoshard.solvers.local import Aim, Choice, descend, links
from autoshard.solvers.memory_rows import MemoryRows, expected
from autoshard.solvers.options import Clock, Options
from autoshard.solvers.prepare import infeasible, overflows, starting_plan, worth_keeping
from autoshard.solvers.result import TOLERANCE, finish

_ROUNDS = 40  # of adding rows
_NODES = 20_000  # of the search tree: a count, so that plans don't depend on the clock
_SMALLER = 0.7  # the part of the choices below which the program is written again without the rest
_DEAR = 1e4  # overflow against seconds in local search


def solve(problem: Problem, options: Options, *, start: bool = True) -> Solution:
    """The fastest plan within the capacity, with a lower bound. `start`: begin with a plan of dp.

    Raises InfeasibleError where no plan is allowed or fits, UsageError for an engine that there is not.
    """
    if options.engine != "highs":
        return pulp_engine.solve(problem, options)
    started = time.perf_counter()
    search = _Search(condensed(problem), options.clock)
    if start:
        search.offer(starting_plan(problem, options))
    search.run()
    best = search.answer()
    return finish(problem, best, search.value if search.exhausted else search.bound, "ilp", started)


@dataclass
class _Search:
    """The state of one solve; `problem` is on condensed times. `bound` only rises, `best` only gets better."""

    problem: Problem
    clock: Clock
    bound: float = 0.0
    best: Choice | None = None
    value: float = math.inf
    exhausted: bool = False

    def answer(self) -> Choice:
        if self.best is not None:
            return self.best
        raise infeasible(self.problem, proven=self.exhausted)

    def offer(self, choice: Choice | None) -> bool:
        """Takes a plan if it is allowed, fits and is better; says whether it fits."""
        if choice is None or memory(self.problem, choice).max(initial=0.0) > self.problem.capacity_bytes:
            return False
        value = objective(self.problem, choice)
        if value < self.value:
            self.best, self.value = choice, value
        return math.isfinite(value)

    @property
    def closed(self) -> bool:
        if math.isinf(self.value):
            return self.exhausted
        return self.exhausted or self.value - self.bound <= TOLERANCE * abs(self.value)

    def run(self) -> None:
        kept = worth_keeping(self.problem)
        times: list[int] = []
        while not (self.closed or self.clock.over):
            program = _Program(self, kept, times)
            relaxed = program.relax()
            times = program.memory.times
            if relaxed is None or self.closed or self.clock.over:
                return
            self.round(program.highs.model, relaxed)
            fewer = self.fewer(program.highs.model, relaxed)
            if sum(map(len, fewer)) > _SMALLER * sum(map(len, kept)):
                program.branch()
                return
            kept = fewer

    def round(self, model: Linear, relaxed: Relaxed) -> None:
        """The nearest plan to a fractional one, improved one node at a time."""
        choice = model.picked(relaxed.x)
        if math.isinf(objective(self.problem, choice)):
            return
        dear = _DEAR * max(relaxed.bound, 1e-30) / max(self.problem.capacity_bytes, 1.0)
        aim = Aim(1.0, 0.0 if math.isinf(self.problem.capacity_bytes) else dear, self.problem.capacity_bytes)
        self.offer(descend(self.problem, links(self.problem), choice, aim))

    def fewer(self, model: Linear, relaxed: Relaxed) -> list[Integers]:
        """Without the choices that no plan better than the best one has; the best one's own stay."""
        reduced, most = relaxed.reduced, (self.value - relaxed.bound) * (1 + TOLERANCE)
        result = []
        for n, (some, a, b) in enumerate(zip(model.kept, model.first[:-1], model.first[1:], strict=True)):
            stay = reduced[a:b] <= most
            if self.best is not None:
                stay |= some == self.best[n]
            result.append(some[stay])
        return result


class _Program:
    """One linear program, with memory rows for `times` at first."""

    def __init__(self, search: _Search, kept: Sequence[Integers], times: Sequence[int]) -> None:
        self.search = search
        model = linear(search.problem, kept)
        self.highs = Highs(model, search.clock, search.value if search.best else float(model.cost.mean()) * len(kept))
        self.memory = MemoryRows(search.problem, model, len(model.cost))
        self.limit(times)

    def limit(self, times: Sequence[int]) -> None:
        new = [t for t in times if t not in self.memory.times]
        if new:
            self.highs.add(self.memory.rows(new))

    def relax(self) -> Relaxed | None:
        """The relaxation under all the memory rows that it violates; None where it is infeasible or time is out."""
        last = None
        for _ in range(_ROUNDS):
            relaxed = self.highs.relax()
            if relaxed is None:
                self.search.exhausted = not self.search.clock.over
                return None
            last = relaxed
            self.search.bound = max(self.search.bound, min(relaxed.bound, self.search.value))
            if is_integral(relaxed.x[: self.highs.model.choices]):
                self.search.offer(self.highs.model.picked(relaxed.x))
            over = overflows(
                self.search.problem, expected(self.search.problem, self.highs.model, relaxed.x), self.memory.times
            )
            if not over or self.search.closed or self.search.clock.over:
                return last
            self.limit(over)
        return last

    def branch(self) -> None:
        """Branch and bound; rows for what its solutions overflow, and again."""
        search, model = self.search, self.highs.model
        for _ in range(_ROUNDS):
            start = model.columns_of(search.best) if search.best is not None else None
            found = self.highs.integer(start, _NODES, 0.0)
            search.bound = max(search.bound, min(found.bound, search.value))
            if found.x is None:
                search.exhausted = found.done
                return
            choice = model.picked(found.x)
            fits = search.offer(choice)
            if fits or search.clock.over:
                if fits and found.done:
                    search.bound = max(search.bound, min(found.bound, search.value))
                return
            over = overflows(search.problem, memory(search.problem, choice), self.memory.times)
            if over:
                self.limit(over)
            else:
                self.highs.exclude(model.columns_of(choice))


def is_integral(x: Floats) -> bool:
    return bool((np.minimum(x, 1.0 - x) < 1e-6).all())
