"""The memory limit where exact tables are large: few of them, begun from cheap ones, and layers of two plans mixed.

1. The least memory: without seconds tables are small. It is above the limit, or a first plan is found near it.
2. Prices of bytes from the plans so far, and the least plan under them: while prices still move by shares of readers,
   whose bounds are weak but whose plans are good, then in exact tables without hubs. Each gives a bound and a plan.
3. Plans that follow one of the best up to a place and another one after it: the gap is what one layer weighs.
"""

from __future__ import annotations

import math

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.solvers.common.clock import attempt, check
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.infeasibility import short
from autoshard.solvers.common.local_search import weighed_mixtures
from autoshard.solvers.common.result import fits, none_within
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import SOON_ENTRIES, Minimum, minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax import reader_terms
from autoshard.solvers.relax.memory_columns import PENALTY, Column, column_of, condensed, master_prices
from autoshard.solvers.relax.reader_shares import ReaderShares

_LIGHT_ROUNDS = 10  # for the least memory
_ROUNDS = 12  # by shares
_EXACT_ROUNDS = 8
_STALLED = 5e-4  # relative: what the best mixture must gain for another round by shares
LOOSE = 1e-3  # relative gap that is worth more work
_PAIRS = 4  # plans that are mixed
_CUTS = 96  # between two of them


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
        self.pairs = _PAIRS

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
        if any(fits(own.peak, self.capacity) for own in self.columns):
            return
        for _ in range(_LIGHT_ROUNDS):
            prices = master_prices(light, times, 0.0, 0.0, unit, 1.0)[0] if light else np.ones(1)
            multipliers = np.zeros(self.problem.horizon)
            multipliers[times] = prices / (prices.sum() or 1.0)
            found = attempt(self._least, multipliers, 0.0)
            if found is None:
                return
            if none_within(found.bound, self.capacity):
                raise short(self.problem, found.bound - self.capacity, multipliers)
            own = self._take(found)
            if fits(own.peak, self.capacity) or any(own.choice == other.choice for other in light):
                return
            light.append(own)

    def dual(self) -> None:
        """Raises the bound as far as prices can."""
        unit, scale = self.capacity or 1.0, abs(self.columns[0].seconds) or 1.0
        last, by_shares, exact = math.inf, 0, 0
        while by_shares < _ROUNDS and exact < _EXACT_ROUNDS:
            finite = [own for own in self.columns if math.isfinite(own.seconds)]
            prices, value = master_prices(finite, self.times, 1.0 / scale, self.capacity, unit, PENALTY)
            multipliers = np.zeros(self.problem.horizon)
            multipliers[self.times] = prices * scale / unit
            cheap = self.cheap and exact == 0 and value < last * (1 - _STALLED)
            cheap |= not self.exact
            found = attempt(self._by_shares if cheap else self._least, multipliers)
            check()
            if found is None:  # prices part layers that are alike without them: there are more tables then
                self.cheap, self.exact = self.cheap and not cheap, self.exact and cheap
                if not (self.cheap or self.exact):
                    return
                continue
            known = {own.choice for own in self.columns}
            reached = found.bound - float(multipliers.sum()) * self.capacity
            if reached > self.state.bound:
                self.best = multipliers
            self.state.raise_bound(reached)
            own = self._take(found)
            last, by_shares, exact = value, by_shares + cheap, exact + (not cheap)
            if value * scale - self.state.bound <= LOOSE * value * scale or (not cheap and own.choice in known):
                return
            if cheap:
                self.shares.shift(found.choice, 0.5 / by_shares)

    def mix(self) -> None:
        """The best between two of those that are least at the bound's prices."""

        def least(own: Column) -> float:
            return own.seconds + float(self.best @ own.bytes)

        ranked = sorted((own for own in self.columns if math.isfinite(own.seconds)), key=least)
        fit = [own for own in ranked if fits(own.peak, self.capacity)][: self.pairs]
        over = [own for own in ranked if not fits(own.peak, self.capacity)][: self.pairs]
        for first in fit:
            for second in over:
                if second.seconds < self.state.value:
                    mixed = weighed_mixtures(self.problem, first.choice, second.choice, _CUTS)
                    for seconds, choice in sorted(mixed):
                        if seconds >= self.state.value:
                            break
                        self.state.offer(choice)
                if self.state.gap <= LOOSE:
                    return
            check()

    def _take(self, found: Minimum) -> Column:
        choice = self.shares.given_heads(self.problem, tuple(found.choice))
        own = column_of(self.problem, choice)
        self.columns.append(own)
        if math.isfinite(own.seconds):
            self.state.offer(choice)
            self.shares.remember(choice)
        return own

    def _by_shares(self, multipliers: Floats) -> Minimum | None:
        part = self.shares.apart(self.problem, multipliers)
        self.contents.also(part)
        return minimum_within(part, self.contents, budget_entries=SOON_ENTRIES)

    def _least(self, multipliers: Floats, scale: float = 1.0) -> Minimum | None:
        """The minimum under prices, exact but for the hubs; None where its tables are too large."""
        part = reader_terms.without_hubs(additive(self.problem, multipliers, scale), self.shares.cut)
        self.contents.also(part)
        return minimum_within(part, self.contents, multipliers=multipliers, scale=scale, budget_entries=self.budget)
