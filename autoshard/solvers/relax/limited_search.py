"""The memory limit: prices on the bytes of the times that bind, few of them, and layers of two plans mixed.

With c(x) the seconds of a plan, m_t(x) its bytes at time t, C the capacity and prices p_t >= 0 in seconds a byte:

    L(p) = min_x c(x) + sum_t p_t (m_t(x) - C)  <=  min { c(x) : m_t(x) <= C for all t }

- The least memory: without seconds tables are small. It is above the limit, or a first plan is found near it.
  Implemented in `limited_search.LimitedSearch.light`.
- p is the dual of the best mixture of the plans k so far: minimise sum_k w_k c_k with sum_k w_k m_tk <= C and
  sum_k w_k = 1, on the times t that bind; a time is added where the mixture overflows. Implemented in
  `memory_columns.master_prices` and `restricted_master.mixture`.
- The least plan under p gives L(p), a bound, and the next plan: while prices still move by shares of readers, whose
  bounds are weak but whose plans are good, then in exact tables without hubs. Implemented in
  `limited_search.LimitedSearch.dual`.
- Plans that follow one of the best up to a place and another one after it: the gap is what one layer weighs.
  Implemented in `limited_search.LimitedSearch.mix`.
- A peak lies just before a stop that follows a start: no other time needs a p_t. Implemented in
  `memory_columns.condensed`.
"""

from __future__ import annotations

import math

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats
from autoshard.solvers.common.clock import attempt, check
from autoshard.solvers.common.effort import FIRST, LOOSE, ROUNDS, SOON_ENTRIES
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.infeasibility import short
from autoshard.solvers.common.local_search import Aim, descend, links, mixtures, polished
from autoshard.solvers.common.result import fits, none_within
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import Minimum, minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax import reader_terms
from autoshard.solvers.relax.memory_columns import PENALTY, Column, column_of, condensed, master_prices
from autoshard.solvers.relax.reader_shares import ReaderShares

_PAIRS = 2  # plans that are mixed
CUTS = 96  # between two of them


def fitted(state: Incumbent, minimum: Minimum, budget: int) -> Floats:
    """Leaves the minimum without a limit, and where it overflows what LimitedSearch finds; the prices of memory behind
    the bound, seconds a byte over the condensed times.

    Raises InfeasibleError where it is proven that nothing fits, or where no plan is met that is allowed (unproven).
    """
    state.raise_bound(minimum.bound)
    if state.offer(minimum.choice if minimum.exact else polished(state.problem, minimum.choice)):
        return np.zeros(state.problem.horizon)
    if state.near is None:
        raise InfeasibleError(
            "no allowed combination of strategies was found; that there is none is not proven", proven=False
        )
    search = LimitedSearch(state, ReaderShares(state.problem, hubs=not minimum.exact), budget, exact=minimum.exact)
    search.run()
    if state.choice is not None:  # node by node, overflow so expensive that no saving of time pays for it
        aim = Aim(1.0, PENALTY * state.value / max(search.capacity, 1.0), search.capacity)
        linked = links(search.problem)
        lean = sorted(
            (column for column in search.columns if math.isfinite(column.seconds)), key=lambda column: column.peak
        )[:FIRST]
        for start in dict.fromkeys([state.choice, *(column.choice for column in lean)]):
            state.offer(descend(search.problem, linked, start, aim))
    return search.best


class LimitedSearch:
    """`columns`: the plans met, in order. `exact`: exact tables are known to fit, and shares are not tried."""

    def __init__(self, state: Incumbent, shares: ReaderShares, budget: int, exact: bool = False) -> None:
        assert state.near is not None, "there is a plan that overflows"
        self.state, self.shares, self.budget = state, shares, budget
        self.problem = condensed(state.problem)
        self.capacity = state.problem.capacity_bytes
        self.contents = Contents(self.problem)
        self.columns = [column_of(self.problem, state.near)]
        self.columns += [column_of(self.problem, choice) for choice in shares.limited]
        self.times = [int(np.argmax(self.columns[0].bytes))]
        self.best: Floats = np.zeros(self.problem.horizon)  # prices of the bound
        self.cheap = not exact  # shares are worth it, and fit
        self.exact = True  # such tables fit

    def run(self) -> None:
        """Leaves the best plan that fits, where one is found, and the bound. Raises InfeasibleError where none fits."""
        self.light()
        self.dual()
        self.mix()

    def light(self) -> None:
        """A plan that fits, or the proof that there is none."""
        light: list[Column] = []
        times = list(self.times)
        unit = max(self.columns[0].peak, 1.0)
        if any(fits(column.peak, self.capacity) for column in self.columns):
            return
        for _ in range(ROUNDS):
            prices = master_prices(light, times, 0.0, 0.0, unit, 1.0)[0] if light else np.ones(1)
            multipliers = np.zeros(self.problem.horizon)
            multipliers[times] = prices / (prices.sum() or 1.0)
            minimum = attempt(self._least, multipliers, 0.0)
            if minimum is None:
                return
            if none_within(minimum.bound, self.capacity):
                raise short(self.problem, minimum.bound - self.capacity, multipliers)
            column = self._take(minimum)
            if fits(column.peak, self.capacity) or any(column.choice == other.choice for other in light):
                return
            light.append(column)

    def dual(self) -> None:
        """Raises the bound as far as prices can."""
        unit, scale = self.capacity or 1.0, abs(self.columns[0].seconds) or 1.0
        last, by_shares, exact = math.inf, 0, 0
        while by_shares < ROUNDS and exact < ROUNDS:
            finite = [column for column in self.columns if math.isfinite(column.seconds)]
            prices, value = master_prices(finite, self.times, 1.0 / scale, self.capacity, unit, PENALTY)
            multipliers = np.zeros(self.problem.horizon)
            multipliers[self.times] = prices * scale / unit
            cheap = self.cheap and exact == 0 and value < last * (1 - LOOSE)
            cheap |= not self.exact
            minimum = attempt(self._by_shares if cheap else self._least, multipliers)
            check()
            if minimum is None:  # prices part layers that are alike without them: there are more tables then
                self.cheap, self.exact = self.cheap and not cheap, self.exact and cheap
                if not (self.cheap or self.exact):
                    return
                continue
            known = {column.choice for column in self.columns}
            reached = minimum.bound - float(multipliers.sum()) * self.capacity
            if reached > self.state.bound:
                self.best = multipliers
            self.state.raise_bound(reached)
            column = self._take(minimum)
            last, by_shares, exact = value, by_shares + cheap, exact + (not cheap)
            if value * scale - self.state.bound <= LOOSE * value * scale or (not cheap and column.choice in known):
                return
            if cheap:
                self.shares.shift(minimum.choice, 0.5 / by_shares)

    def mix(self) -> None:
        """The best between two of those that are least at the bound's prices."""

        def least(column: Column) -> float:
            return column.seconds + float(self.best @ column.bytes)

        ranked = sorted((column for column in self.columns if math.isfinite(column.seconds)), key=least)
        fit = [column for column in ranked if fits(column.peak, self.capacity)][:_PAIRS]
        over = [column for column in ranked if not fits(column.peak, self.capacity)][:_PAIRS]
        for first in fit:
            for second in over:
                if second.seconds < self.state.value:
                    mixed = mixtures(self.problem, first.choice, second.choice, CUTS)
                    for seconds, choice in sorted(mixed):
                        if seconds >= self.state.value:
                            break
                        self.state.offer(choice)
                if self.state.gap <= LOOSE:
                    return
            check()

    def _take(self, minimum: Minimum) -> Column:
        choice = self.shares.with_best_heads(self.problem, tuple(minimum.choice))
        column = column_of(self.problem, choice)
        self.columns.append(column)
        if math.isfinite(column.seconds):
            self.state.offer(choice)
            self.shares.remember(choice)
        return column

    def _by_shares(self, multipliers: Floats) -> Minimum | None:
        part = self.shares.apart(self.problem, multipliers)
        self.contents.also(part)
        return minimum_within(part, self.contents, budget_entries=SOON_ENTRIES)

    def _least(self, multipliers: Floats, scale: float = 1.0) -> Minimum | None:
        """The minimum under prices, exact but for the hubs; None where its tables are too large."""
        part = reader_terms.without_hubs(additive(self.problem, multipliers, scale), self.shares.cut)
        self.contents.also(part)
        return minimum_within(part, self.contents, multipliers=multipliers, scale=scale, budget_entries=self.budget)
