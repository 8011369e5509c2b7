"""The least memory: a bound on every plan's peak, and plans at the prices of bytes behind it.

With c(x) the seconds of a plan, m_t(x) its bytes at time t and p the prices of `memory_columns.memory_dual`, at which
sum_t p_t m_t(x) >= B for every plan, a plan at a rate r is the least of

    c(x) + r c_0 sum_t p_t m_t(x) / B

c_0 seconds of a plan near the bound B: 1 % of its memory is worth r % of its seconds. At a rate far above what seconds
are worth it is the fastest of those at the bound, if it meets it. Values that are read all over are cut off, so that
layers fold, and chosen again for their readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from autoshard.ir.problem import Floats, Problem, objective
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.effort import BUDGET_ENTRIES, SOON_ENTRIES
from autoshard.solvers.common.infeasibility import least
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import Minimum, minimise, minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax import reader_terms
from autoshard.solvers.relax.memory_columns import Column, column_of, condensed, memory_dual
from autoshard.solvers.relax.reader_shares import ReaderShares
from autoshard.solvers.relax.restricted_start import MUCH_WORK, Near, exact_work, solve_top_k
from autoshard.units import ROUNDING

_ABOVE_SECONDS = 1e6  # the rate of the least memory


def minimum_memory_bound(problem: Problem, *, budget_entries: int = BUDGET_ENTRIES) -> float:
    """Bytes that no plan's peak can be below; watched, a lower bound of that may be all there is time for.

    Raises InfeasibleError where no choice is allowed at all.
    """
    return LowMemoryPlans(problem, budget_entries).bound


class LowMemoryPlans:
    """`bound`: bytes that no plan's peak is below, whatever the capacity.

    `prices`: of the times of the condensed problem, 1 together, or 0 where time was over. Raises InfeasibleError where
    no choice is allowed at all.
    """

    def __init__(self, problem: Problem, budget_entries: int = BUDGET_ENTRIES) -> None:
        self.problem, self.budget = condensed(problem), budget_entries
        self.bound = least(self.problem).bytes
        self.prices: Floats = np.zeros(self.problem.horizon)
        self.seconds = math.inf  # of a plan near the bound
        self.columns: tuple[Column, ...] = ()  # plans met
        self.sketched = exact_work(problem) > MUCH_WORK  # plans over few choices of each node do
        self.contents = Contents(self.problem)
        start = attempt(self._start)
        if start is not None:
            first = column_of(self.problem, start)
            dual = memory_dual(self.problem, first, budget_entries)
            self.bound, self.prices = max(self.bound, dual.bound), dual.multipliers
            self.columns = dual.columns
            self.seconds = min(column.seconds for column in dual.columns)

    def at_bound(self, *, roughly: bool = False) -> Choice | None:
        """Plan at the bound, the fastest of these but for what is cut off; None where none is met.

        `roughly`: where that needs more than the bound at times that have no price, the leanest so far will do."""
        met = self._at_bound(self._folded)
        if met is None and roughly:
            return self._leanest()
        if met is None and (self.shares.cut or self.budget > SOON_ENTRIES):
            met = self._at_bound(self._whole)
        return met

    def at_rate(self, rate: float) -> Choice | None:
        """The plan at a rate, near it where tables are large; None where they are too large, or time is over."""
        return attempt(self._folded, self._multipliers(rate)) if 0 < self.seconds < math.inf else None

    def _at_bound(self, solve: Callable[[Floats], Choice | None]) -> Choice | None:
        choice = attempt(solve, self._multipliers(_ABOVE_SECONDS)) if 0 < self.seconds < math.inf else None
        if choice is None:
            return None
        column = column_of(self.problem, choice)
        self.columns += (column,)
        if column.peak > self.bound * (1 + ROUNDING):
            return None
        self.seconds = min(self.seconds, column.seconds)
        return choice

    def _leanest(self) -> Choice | None:
        """The fastest of those at the bound, else the one of the least peak."""
        allowed = [column for column in self.columns if column.seconds < math.inf]
        best = min(allowed, key=lambda c: (max(c.peak, self.bound * (1 + ROUNDING)), c.seconds), default=None)
        return None if best is None else best.choice

    def _start(self) -> Choice:
        """The first plan that is allowed: of those that cost the same, nothing, the minimum is the lowest."""
        problem = self.problem
        arrays = {id(node.seconds): node.seconds for node in problem.nodes}
        arrays |= {id(value.seconds): value.seconds for value in problem.values}
        if all(np.isfinite(seconds).all() for seconds in arrays.values()):
            return (0,) * len(problem.nodes)
        return minimise(problem, self.contents, scale=0.0, budget_entries=self.budget).choice

    def _multipliers(self, rate: float) -> Floats:
        """Seconds a byte, over time."""
        return rate * self.seconds / max(self.bound, 1.0) * self.prices

    def _folded(self, multipliers: Floats) -> Choice | None:
        """Plan exact but for what is cut off; where its tables are too large, with readers of a value apart; where
        these are, too, over few choices of each node."""
        solved: Minimum | Near | None = None if self.sketched else self._least(multipliers)
        solved = solved or solve_top_k(self.shares.apart(self.problem, multipliers), SOON_ENTRIES)
        choice = None if solved is None else self.shares.with_best_heads(self.problem, solved.choice, multipliers)
        return choice if choice is not None and math.isfinite(objective(self.problem, choice)) else None

    def _least(self, multipliers: Floats) -> Minimum | None:
        part = reader_terms.without_hubs(additive(self.problem, multipliers), self.shares.cut)
        self.contents.also(part)
        minimum = minimum_within(part, self.contents, multipliers=multipliers, budget_entries=SOON_ENTRIES)
        if minimum is not None:
            return minimum
        part = self.shares.apart(self.problem, multipliers)
        self.contents.also(part)
        return minimum_within(part, self.contents, budget_entries=SOON_ENTRIES)

    def _whole(self, multipliers: Floats) -> Choice | None:
        return minimise(self.problem, self.contents, multipliers=multipliers, budget_entries=self.budget).choice

    @cached_property
    def shares(self) -> ReaderShares:
        return ReaderShares(self.problem)
