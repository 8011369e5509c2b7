"""Plans with their bytes over time, the prices of bytes that follow from several, and the least peak that these prove.

The least peak of a problem is at least the largest over prices p >= 0, sum_t p_t = 1, of min_x sum_t p_t m_t(x), m_t(x)
the bytes of plan x at time t. Prices come from the best mixture of the plans so far, plans from the minimum at prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.ir.problem import Floats, Node, Problem, Value, memory, objective
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.effort import CLOSE, MOST_ROUNDS
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import minimise
from autoshard.solvers.relax.restricted_master import mixture
from autoshard.units import ROUNDING

PENALTY = 1e4  # objective units per unit of memory, relative: above any useful multiplier


@dataclass(frozen=True, eq=False)
class Dual:
    """`bound`: the best value of the dual, at `multipliers` (horizon,); `columns`: the plans met, in order."""

    bound: float
    multipliers: Floats
    columns: tuple[Column, ...]


@dataclass(frozen=True, eq=False)
class Column:
    """A plan met on the way, with its true seconds and its bytes over time."""

    choice: Choice
    seconds: float
    bytes: Floats

    @property
    def peak(self) -> float:
        return float(self.bytes.max(initial=0.0))


def condensed(problem: Problem) -> Problem:
    """The problem on the times where a peak can be: just before a stop that follows a start."""
    spans = [node.interval for node in problem.nodes] + [s for value in problem.values for s in value.intervals]
    starts = np.unique([start for start, stop in spans if start < stop])
    stops = np.unique([stop for start, stop in spans if start < stop])
    before = np.searchsorted(starts, stops)  # starts before each stop
    times = stops[np.diff(before, prepend=0) > 0] - 1

    every = np.array(spans, np.int64).reshape(-1, 2)
    moved = np.where(every[:, :1] < every[:, 1:], np.searchsorted(times, every), 0).tolist()
    following = map(tuple, moved)
    nodes = tuple(Node(node.name, node.seconds, node.bytes, next(following)) for node in problem.nodes)
    values = tuple(
        Value(
            v.name, v.producer, v.consumers, v.source, v.targets, v.seconds, v.bytes,
            tuple(next(following) for _ in v.intervals),
        )
        for v in problem.values
    )  # fmt: skip
    return replace(problem, nodes=nodes, values=values, horizon=max(1, len(times)))


def master_prices(
    columns: Sequence[Column], times: list[int], weight: float, capacity: float, unit: float, penalty: float
) -> tuple[Floats, float]:
    """Multipliers of `times` and the master's value; adds to `times` every one where the mixture overflows."""
    costs = np.array([weight * column.seconds if weight else 0.0 for column in columns])
    alive = np.stack([column.bytes for column in columns], axis=1) / unit
    while True:
        limits = np.full(len(times), capacity / unit)
        prices, weights, value = mixture(costs, alive[times], limits, penalty)
        mixed = alive @ weights
        worst = int(np.argmax(mixed))
        if worst in times or mixed[worst] <= max(mixed[times].max(), capacity / unit) + ROUNDING:
            return prices, value
        times.append(worst)


def column_of(problem: Problem, choice: Choice) -> Column:
    return Column(choice, objective(problem, choice), memory(problem, choice))


def memory_dual(problem: Problem, first: Column, budget: int) -> Dual:
    """The bound on the least peak in bytes, from the plan `first`, and the prices behind it, which add up to 1.

    Where all is paid at one time, plans that need the same there are alike, and what they need at others is any: the
    dual would ask for one time after another. A small price at every time distinguishes them."""
    run = _LeastPeak(problem, first, budget)
    for _ in range(MOST_ROUNDS):
        if not run.round(run.spread()) or run.least - run.bound <= 2 * CLOSE * run.bound:
            break
    for _ in range(MOST_ROUNDS):
        if run.closed or not run.round(run.master()):
            break
    return run.dual


class _LeastPeak:
    """Rounds of `memory_dual`. `least`: what the best mixture of the plans so far needs, or the leanest of them."""

    def __init__(self, problem: Problem, first: Column, budget: int) -> None:
        self.problem, self.contents, self.budget = problem, Contents(problem), budget
        self.columns, self.times = [first], [int(np.argmax(first.bytes))]
        self.unit = first.peak or 1.0
        self.bound, self.prices = 0.0, np.zeros(problem.horizon)
        self.least = math.inf

    @property
    def closed(self) -> bool:
        return self.least - self.bound <= ROUNDING * self.bound

    @property
    def dual(self) -> Dual:
        return Dual(self.bound, self.prices, tuple(self.columns))

    def master(self) -> Floats:
        """Prices of the best mixture."""
        some, value = master_prices(self.columns, self.times, 0.0, 0.0, self.unit, 1.0)
        self.least = min(self.least, value * self.unit)
        prices = np.zeros(self.problem.horizon)
        prices[self.times] = some
        return prices

    def spread(self) -> Floats:
        """The prices, smoothed: every time has at least a small one, and the bound loses no more than a gap that is not
        worth another round."""
        return (1 - CLOSE) * self.master() + CLOSE / self.problem.horizon

    def round(self, prices: Floats) -> bool:
        """The minimum at the prices, which bounds the peak; False where its plan is known, or time is over."""
        minimum = attempt(
            minimise, self.problem, self.contents, multipliers=prices, scale=0.0, budget_entries=self.budget
        )
        if minimum is None:
            return False
        if minimum.bound > self.bound:
            self.bound, self.prices = minimum.bound, prices
        return self.add(minimum.choice)

    def add(self, choice: Choice) -> bool:
        if any(choice == column.choice for column in self.columns):
            return False
        self.columns.append(column_of(self.problem, choice))
        self.least = min(self.least, self.columns[-1].peak)
        return True
