"""A memory limit, or nodes of hundreds of choices, where exact tables over all choices take seconds, or don't fit: the
few choices that messages rank first, and what all plans cost at the least.

1. Messages without prices rank the choices, over one of equal layers where there are such (`restricted_start.py`),
   else over all (`trws_layouts.Beliefs`); the problem over the first few is solved, in small tables. Without a limit
   more rounds of messages raise the bound, until it is near the plan (`hub_relaxation.bounded`).
2. Where that plan overflows: the least memory in full, or the proof that nothing fits. Then the problem over few
   choices is solved within the limit, which leaves prices of bytes; messages under these rank the choices that are
   added for the next time.
3. Once prices settle: the least under them over all choices bounds every plan that fits, or where its tables don't fit
   messages do. What is least is added, and 2 goes on from there while that gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem, objective
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.effort import BUDGET_ENTRIES, FIRST, MOST_ROUNDS, PLANS, ROUGHLY, ROUNDS, SOME
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.solver_options import Clock
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import Minimum, minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax import hub_relaxation, hubs_apart, reader_terms
from autoshard.solvers.relax.limited_search import LimitedSearch
from autoshard.solvers.relax.memory_columns import condensed
from autoshard.solvers.relax.reader_shares import ReaderShares
from autoshard.solvers.relax.restricted_start import narrowed, ranking, top_k_choices
from autoshard.solvers.relax.trws_layouts import Beliefs


def search(state: Incumbent, shares: ReaderShares, budget: int, loose: float, clock: Clock | None = None) -> None:
    """Leaves plans and bounds until the gap is below `loose`, or prices settle.

    Raises InfeasibleError where it is proven that nothing fits.
    """
    problem = condensed(state.problem)
    beliefs = Beliefs(additive(problem))
    climb(state, beliefs, 0.0, FIRST, loose)
    keep = [some[:SOME] for some in ranking(problem, beliefs)]
    _free(state, replace(problem, capacity_bytes=math.inf), keep)
    if state.near is None and shares.cut and math.isinf(problem.capacity_bytes):
        _closed(state, beliefs, loose, clock or Clock())
    elif state.near is None:
        climb(state, beliefs, 0.0, ROUNDS, loose)
    else:
        WideChoices(state, problem, shares, budget, loose).run(keep)


def _closed(state: Incumbent, beliefs: Beliefs, loose: float, clock: Clock) -> None:
    """Close the gap without a limit, if no exact tables fit next to hubs: more rounds raise the bound, and what they
    rank first gives better plans."""
    climb(state, beliefs, 0.0, ROUNDS, loose)
    if state.gap > loose:
        _free(state, state.problem, [some[:SOME] for some in ranking(state.problem, beliefs)])
        climb(state, beliefs, 0.0, MOST_ROUNDS, loose)
    minimum = hub_relaxation.bounded(state, clock, beliefs) if state.gap > loose else None
    if minimum is not None:
        state.raise_bound(minimum.bound)
        state.offer(minimum.choice)


class WideChoices:
    """Plans that fit, near one that overflows (`state.near`). `problem`: that of `state` on condensed times."""

    def __init__(self, state: Incumbent, problem: Problem, shares: ReaderShares, budget: int, loose: float) -> None:
        assert state.near is not None, "there is a plan that overflows"
        self.state, self.problem, self.shares, self.budget, self.loose = state, problem, shares, budget, loose
        self.contents = Contents(problem)
        self.plans = [state.near]
        self.beliefs: Beliefs | None = None  # of the last prices, where nothing repeats

    def run(self, keep: list[Integers] | None = None, exact_rounds: int = FIRST) -> bool:
        """`keep`: the choices to begin with. `exact_rounds`: over all choices, at most. Whether there is a plan and
        prices have settled. Raises InfeasibleError where it is proven that nothing fits."""
        if self.state.choice is None:
            full = LimitedSearch(self.state, self.shares, self.budget)
            full.light()
            self.plans = [column.choice for column in full.columns]
        keep = keep or self.ranked(np.zeros(self.problem.horizon))
        before = math.inf
        while self.state.gap > self.loose:
            prices = self.within(keep)
            if prices is None:
                return False
            more = self.ranked(prices)
            if self.state.value > before * (1 - ROUGHLY):
                new, exact_rounds = self.exactly(prices) if exact_rounds > 0 else False, exact_rounds - 1
                if not new:
                    return new is not None
            before = self.state.value
            keep = [np.union1d(old, some) for old, some in zip(keep, more, strict=True)]
        return True

    def ranked(self, prices: Floats) -> list[Integers]:
        """The first few choices of each node under these prices; all of what is chosen for its readers."""
        part = reader_terms.without_hubs(additive(self.problem, prices), self.shares.cut)
        few = top_k_choices(part, SOME, prices)
        self.beliefs = None if few else self.messages(prices)
        if self.beliefs is not None:
            return [some[:SOME] for some in ranking(self.problem, self.beliefs)]
        assert few is not None
        for n in (*self.shares.heads, *self.shares.views):
            few[n] = np.arange(len(self.problem.nodes[n].seconds))
        return few

    def messages(self, prices: Floats) -> Beliefs:
        """Between all nodes; they raise the bound."""
        beliefs = Beliefs(additive(self.problem, prices))
        climb(self.state, beliefs, self.paid(prices), FIRST, self.loose)
        return beliefs

    def paid(self, prices: Floats) -> float:
        """Price of the whole capacity at these prices."""
        return float(prices.sum()) * self.problem.capacity_bytes

    def within(self, few: list[Integers]) -> Floats | None:
        """Leaves the best plan within the limit over these choices and those of `plans`, to which it adds those that it
        finds; returns the prices of bytes behind its bound. None where there is no plan."""
        state, problem = self.state, self.problem
        known = [choice for choice in (state.choice, state.near) if choice is not None]
        start = list(dict.fromkeys([*self.plans, *known]))
        keep = [np.union1d(some, [choice[n] for choice in start]).astype(np.int64) for n, some in enumerate(few)]
        inner = Incumbent(narrowed(problem, keep))
        shares = ReaderShares(inner.problem)
        for choice in start:
            lowered = tuple(int(np.searchsorted(some, s)) for some, s in zip(keep, choice, strict=True))
            inner.offer(lowered)
            shares.remember(lowered)
        if inner.near is None:
            return None
        within = LimitedSearch(inner, shares, BUDGET_ENTRIES, exact=True)
        try:
            attempt(within.run)
        except InfeasibleError:  # of these few
            return None
        met = (_whole(keep, column.choice) for column in within.columns)
        self.plans = list(dict.fromkeys([*self.plans, *met]))[-PLANS:]
        if inner.choice is None:
            return None
        state.offer(_whole(keep, inner.choice))
        return within.best

    def exactly(self, prices: Floats) -> bool | None:
        """Leaves the bound of the least under prices over all choices, but for what is cut off, and its plan; True if
        that is new. None where nothing repeats, so that tables are too large, or time is over."""
        minimum = self.least(prices) if self.beliefs is None else None  # equal layers are one
        if minimum is None:
            return None
        self.state.raise_bound(minimum.bound - self.paid(prices))
        choice = self.shares.with_best_heads(self.problem, minimum.choice)
        self.state.offer(choice)
        new = choice not in self.plans and math.isfinite(objective(self.problem, choice))
        self.plans += [choice] if new else []
        return new

    def least(self, prices: Floats) -> Minimum | None:
        """Least under the prices; None where its tables or time don't suffice."""
        part = reader_terms.without_hubs(additive(self.problem, prices), self.shares.cut)
        self.contents.also(part)
        return attempt(minimum_within, part, self.contents, multipliers=prices, budget_entries=self.budget)


def climb(state: Incumbent, beliefs: Beliefs, paid: float, most: int, loose: float) -> None:
    """Rounds of messages. `paid`: what the prices give for the capacity."""
    while beliefs.rounds < most and not (beliefs.rounds >= FIRST and state.gap <= loose):
        if beliefs.rounds >= FIRST:
            beliefs.shift()
        state.raise_bound(beliefs.round() - paid)


def _free(state: Incumbent, problem: Problem, keep: list[Integers]) -> None:
    """Leaves a plan over these choices, whatever it keeps."""
    inner = Incumbent(narrowed(problem, keep))
    try:
        shares = ReaderShares(inner.problem)
        if math.isfinite(state.problem.capacity_bytes) or not hubs_apart.search(inner, shares):
            shares.search(inner)
    except InfeasibleError:  # of these few
        return
    if inner.choice is not None:
        state.offer(_whole(keep, inner.choice))


def _whole(keep: Sequence[Integers], choice: Sequence[int]) -> Choice:
    return tuple(int(some[s]) for some, s in zip(keep, choice, strict=True))
