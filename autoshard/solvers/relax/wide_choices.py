"""Nodes of hundreds of choices, in tables that are too large: the few choices that messages rank first, and messages
again for what all plans cost at the least.

1. Messages without prices rank the choices (`trws_layouts.Beliefs`); the problem over the first few is solved, in
   small tables. More rounds raise the bound.
2. Where that plan overflows: the least memory in full, or the proof that nothing fits. Then the problem over few
   choices is solved within the limit, which leaves prices of bytes; messages under these bound all plans that fit, and
   rank the choices that are added for the next time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import BUDGET_ENTRIES, minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax import reader_terms
from autoshard.solvers.relax.hub_relaxation import undercutting
from autoshard.solvers.relax.limited_search import LimitedSearch
from autoshard.solvers.relax.memory_columns import condensed
from autoshard.solvers.relax.pruned_start import narrowed, ranking
from autoshard.solvers.relax.reader_shares import ReaderShares
from autoshard.solvers.relax.trws_layouts import Beliefs

_FIRST = 4  # rounds before choices are ranked, or shares move
_ROUNDS = 12  # the same without prices, where the bound stays open
_FEW = 16  # choices of each node
_BETTER = 3e-3  # relative: worth the choices that other prices rank first
_PAIRS = 2  # plans that are mixed
_PLANS = 12  # that prices begin from


def search(state: Incumbent, shares: ReaderShares, budget: int, loose: float) -> None:
    """Leaves plans and bounds until the gap is below `loose`, or prices settle.

    Raises InfeasibleError where it is proven that nothing fits.
    """
    problem = condensed(state.problem)
    beliefs = Beliefs(additive(problem))
    _climb(state, beliefs, 0.0, _FIRST, loose)
    keep = [some[:_FEW] for some in ranking(problem, beliefs)]
    _free(state, replace(problem, capacity_bytes=math.inf), keep)
    if state.near is None:
        _climb(state, beliefs, 0.0, _ROUNDS, loose)
        return
    plans, before = [state.near], math.inf
    if state.choice is None:
        full = LimitedSearch(state, shares, budget)
        full.light()
        plans = [own.choice for own in full.columns]
    while True:
        prices = _within(state, problem, keep, plans)
        if prices is None:
            return
        paid = float(prices.sum()) * problem.capacity_bytes
        beliefs = Beliefs(additive(problem, prices))
        _climb(state, beliefs, paid, _FIRST, loose)
        if state.gap <= loose:
            return
        if state.value > before * (1 - _BETTER):
            _exactly(state, problem, beliefs, prices, shares.cut)
            return
        before = state.value
        ranked = ranking(problem, beliefs)
        keep = [np.union1d(old, some[:_FEW]) for old, some in zip(keep, ranked, strict=True)]


def _climb(state: Incumbent, beliefs: Beliefs, paid: float, most: int, loose: float) -> None:
    """Rounds of messages. `paid`: what the prices give for the capacity."""
    while beliefs.rounds < most and not (beliefs.rounds >= _FIRST and state.gap <= loose):
        if beliefs.rounds >= _FIRST:
            beliefs.shift()
        state.raise_bound(beliefs.round() - paid)


def _free(state: Incumbent, problem: Problem, keep: list[Integers]) -> None:
    """Leaves a plan over these choices, whatever it keeps."""
    inner = Incumbent(narrowed(problem, keep))
    try:
        ReaderShares(inner.problem).search(inner)
    except InfeasibleError:  # of these few
        return
    if inner.choice is not None:
        state.offer(_whole(keep, inner.choice))


def _within(state: Incumbent, problem: Problem, few: list[Integers], plans: list[Choice]) -> Floats | None:
    """Leaves the best plan within the limit over these choices and those of `plans`, to which it adds those that it
    meets; gives the prices of bytes behind its bound. None where there is no plan."""
    known = [own for own in (state.choice, state.near) if own is not None]
    start = list(dict.fromkeys([*plans, *known]))
    keep = [np.union1d(some, [own[n] for own in start]).astype(np.int64) for n, some in enumerate(few)]
    inner = Incumbent(narrowed(problem, keep))
    shares = ReaderShares(inner.problem)
    for own in start:
        lowered = tuple(int(np.searchsorted(some, s)) for some, s in zip(keep, own, strict=True))
        inner.offer(lowered)
        shares.remember(lowered)
    if inner.near is None:
        return None
    within = LimitedSearch(inner, shares, BUDGET_ENTRIES, exact=True)
    within.pairs = _PAIRS
    try:
        attempt(within.run)
    except InfeasibleError:  # of these few
        return None
    plans[:] = list(dict.fromkeys([*plans, *(_whole(keep, own.choice) for own in within.columns)]))[-_PLANS:]
    if inner.choice is None:
        return None
    state.offer(_whole(keep, inner.choice))
    return within.best


def _exactly(state: Incumbent, problem: Problem, beliefs: Beliefs, prices: Floats, cut: Collection[int]) -> None:
    """The least under prices, but for what is cut off, over the choices that a plan better than the best may have."""
    if state.choice is None:
        return
    paid = float(prices.sum()) * problem.capacity_bytes
    keep = undercutting(problem, beliefs, state.choice, state.value + paid)
    small = narrowed(problem, keep)
    part = reader_terms.without_hubs(additive(small, prices), cut)
    contents = Contents(small)
    contents.also(part)
    found = attempt(minimum_within, part, contents, multipliers=prices)
    if found is not None:
        state.raise_bound(min(found.bound - paid, state.value))
        state.offer(_whole(keep, found.choice))


def _whole(keep: Sequence[Integers], choice: Sequence[int]) -> Choice:
    return tuple(int(some[s]) for some, s in zip(keep, choice, strict=True))
