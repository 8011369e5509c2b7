"""Integer programming on a core: the tight relaxation with memory rows where they are needed, then branch and bound.

Choices whose reduced cost lifts the bound above the best plan known go before the tree is searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers, Node, Problem, Value
from autoshard.solvers.common.clock import Pace
from autoshard.solvers.common.solver_options import Clock
from autoshard.solvers.linear_program.highs_engine import Highs, Relaxed
from autoshard.solvers.linear_program.memory_constraints import LARGEST
from autoshard.solvers.linear_program.rows import Linear, Rows, linear
from autoshard.units import ROUNDING
from benchmarks.contest.core_problem import Inner
from benchmarks.contest.presolve import PairGraph

_ROUNDS = 40  # of adding memory rows
_WINDOWS = 24  # of the horizon: each may add its worst time in a round
_SLACK = 1e-7  # relative: an overflow of the relaxation that is not worth a row
_NODES = 100_000  # of the search tree, where no clock ends it


class Closed(NamedTuple):
    """`choice`: the best plan found that fits, if any. `bound` holds for the choices the program was given; inf: none
    of them fits. `done`: nothing better is left.
    """

    choice: Integers | None
    bound: float
    done: bool


class SectionProgram:
    """The core over the choices `choices`, without memory rows at first.

    `value`: of the best plan, less the core's constant; inf where there is none.
    """

    def __init__(self, core: Inner, choices: Sequence[Integers], clock: Clock, value: float) -> None:
        self.core, self.kept, self.clock = core, choices, clock
        self.model = linear(_problem(core.graph), choices)
        typical = value if math.isfinite(value) else float(self.model.cost.mean()) * len(choices)
        self.highs = Highs(self.model, clock, typical, Pace(2))
        self.times: list[int] = []
        slots = np.concatenate([np.zeros(0, np.int64), *choices])
        begin = np.append(0, core.items.ends[:-1]) if len(choices) else np.zeros(0, np.int64)
        self.slots = slots + np.repeat(begin, [len(some) for some in choices])

    def limit(self, times: Sequence[int]) -> None:
        """Rows for more times, in units of the capacity."""
        new = np.array([t for t in times if t not in self.times], np.int64)
        if not len(new):
            return
        self.times.extend(new.tolist())
        items = self.core.items
        unit = items.capacity or 1.0
        size = items.at(new)[:, self.slots]
        upper = (items.capacity - items.base[new]) / unit
        none = np.full(len(new), -np.inf)
        self.highs.add(Rows(0, size.indptr, size.indices, np.minimum(size.data / unit, LARGEST), none, upper))

    def relax(self) -> Relaxed | None:
        """With all the rows that it violates; None where nothing fits, or time is out before the first bound."""
        last = None
        for _ in range(_ROUNDS):
            relaxed = self.highs.relax()
            if relaxed is None:
                return None if last is None or self.highs.infeasible else last
            last = relaxed
            weights = np.zeros(int(self.core.items.ends[-1]))
            weights[self.slots] = relaxed.x[: len(self.slots)]
            times = self.overflows(self.core.items.expected(weights))
            if not times or self.clock.over:
                break
            self.limit(times)
        return last

    def multipliers(self) -> Floats:
        """Prices of the memory rows in the relaxation that was just solved, shape (times,)."""
        result = np.zeros(len(self.core.items.base))
        if self.times:
            prices = np.array(self.highs.solver.getSolution().row_dual)[-len(self.times) :] / self.highs.scale
            result[self.times] = np.maximum(0.0, -prices) / (self.core.items.capacity or 1.0)
        return result

    def overflows(self, alive: Floats) -> list[int]:
        """The worst times without a row, one in each window."""
        most = self.core.items.capacity * (1 + _SLACK)
        times = []
        for window in np.array_split(np.arange(len(alive)), _WINDOWS):
            worst = int(window[np.argmax(alive[window])]) if len(window) else 0
            if len(window) and alive[worst] > most and worst not in self.times:
                times.append(worst)
        return times

    def choice(self, x: Floats) -> Integers:
        return np.array(self.model.picked(x), np.int64)

    def search(self, start: Integers | None) -> Closed:
        """Branch and bound from a plan that fits; rows for what its solutions overflow, and again."""
        bound, best = -math.inf, start
        for _ in range(_ROUNDS):
            columns = self.model.columns_of(start.tolist()) if start is not None else None
            solution = self.highs.integer(columns, _NODES, 0.0)
            bound = max(bound, solution.bound)
            if solution.x is None:
                return Closed(best, math.inf if solution.done else bound, solution.done)
            choice = self.choice(solution.x)
            if self.core.fits(choice):
                if best is None or self.core.cost(choice) < self.core.cost(best):
                    best = choice
                return Closed(best, bound, solution.done)
            alive = self.core.items.alive(choice)
            times = self.overflows(alive) or [t for t in [int(np.argmax(alive))] if t not in self.times]
            if self.clock.over:
                break
            if times:
                self.limit(times)
            else:
                self.highs.exclude(self.model.columns_of(choice.tolist()))
        return Closed(best, bound, False)


def undercut(model: Linear, relaxed: Relaxed, value: float) -> list[Integers]:
    """The choices that a plan below `value` may have, by reduced cost."""
    most = (value - relaxed.bound) * (1 + ROUNDING) + ROUNDING * abs(value)
    return [
        some[relaxed.reduced[a:b] <= most]
        for some, a, b in zip(model.alive, model.first[:-1], model.first[1:], strict=True)
    ]


def entries(graph: PairGraph, choices: Sequence[Integers] | None = None) -> int:
    """Edge variables of the program."""
    sizes = [len(costs) for costs in graph.unary] if choices is None else [len(some) for some in choices]
    return sum(sizes[a] * sizes[b] for a, b in graph.edges)


def _problem(graph: PairGraph) -> Problem:
    """The graph as a problem without memory."""
    none = {size: np.zeros(size) for size in {len(costs) for costs in graph.unary}}
    each = {size: np.arange(size) for size in none}
    nodes = tuple(Node(f"{n}", costs, none[len(costs)]) for n, costs in enumerate(graph.unary))
    values = []
    for (a, b), cost in graph.edges.items():
        rows, columns = cost.shape
        source, targets = each[rows], (each[columns],)
        values.append(Value(f"{a}-{b}", a, (b,), source, targets, cost, none[columns], ((0, 0),)))
    return Problem(nodes, tuple(values))
