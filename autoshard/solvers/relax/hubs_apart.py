"""Exact but for the hubs, values that nodes all over a problem read: a better plan and bound than shares of all values
leave, in about the time of one of their rounds.

1. A reader pays its even share of the layout that it needs of a hub, from the cheapest source. Layers then repeat, and
   the minimum of the rest is a bound. What hubs are made of is chosen for the readers that this leaves: a plan.
2. Shares don't have readers agree. Where they took several layouts of a hub, that of most is free, and each reader pays
   any other one in full: what a plan costs at the most, but for the free layouts. The least of that is another plan.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem, Value, changed
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.effort import ROUGHLY, SOON_ENTRIES
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax import reader_terms
from autoshard.solvers.relax.reader_shares import ReaderShares


def search(state: Incumbent, shares: ReaderShares) -> bool:
    """Leaves a bound and plans; False where nothing is a hub, the tables are too large, or time is over.

    Raises InfeasibleError where no plan is allowed.
    """
    problem, cut = state.problem, shares.cut
    if not cut:
        return False
    part = reader_terms.without_hubs(additive(problem), cut)
    found = attempt(minimum_within, part, Contents(part), budget_entries=SOON_ENTRIES)
    if found is None:
        return False
    state.raise_bound(found.bound)
    shares.take(state, found.choice, found.bound)
    if state.choice is not None and state.gap > ROUGHLY and not _agree(problem, cut, state.choice):
        _agreed(state, shares, state.choice)
    return True


def _agreed(state: Incumbent, shares: ReaderShares, choice: Choice) -> None:
    part = agreeing(state.problem, shares.cut, choice)
    try:
        found = attempt(minimum_within, part, Contents(part), budget_entries=SOON_ENTRIES)
    except InfeasibleError:  # what makes a hub as `choice` does need not have every layout
        return
    if found is not None:
        shares.take(state, found.choice, state.bound)


def agreeing(problem: Problem, cut: Collection[int], choice: Choice) -> Problem:
    """The problem without `cut`: readers of each have the layout that most of them take in `choice`, an allowed plan,
    for nothing, and pay another from the source in `choice`. A plan with that source costs no more than this says and
    what the free layouts do."""
    seconds = [node.seconds for node in problem.nodes]
    known: dict[tuple[int, int, bytes], Floats] = {}
    for v in sorted(cut):
        value = problem.values[v]
        price = value.seconds[value.source[choice[value.producer]]].copy()
        price[np.bincount(_taken(value, choice)).argmax()] = 0.0
        for c, target in zip(value.consumers, value.targets, strict=True):
            key = (id(seconds[c]), id(target), price.tobytes())
            if key not in known:
                known[key] = seconds[c] + price[target]
            seconds[c] = known[key]
    nodes = tuple(
        node if node.seconds is own else changed(node, seconds=own)
        for node, own in zip(problem.nodes, seconds, strict=True)
    )
    values = tuple(value for v, value in enumerate(problem.values) if v not in cut)
    return replace(problem, nodes=nodes, values=values, capacity_bytes=float("inf"))


def _agree(problem: Problem, cut: Collection[int], choice: Choice) -> bool:
    """Whether all readers of each value take the same layout of it."""
    return all(len(np.unique(_taken(problem.values[v], choice))) == 1 for v in cut)


def _taken(value: Value, choice: Choice) -> Integers:
    """The layout that each reader takes."""
    return np.array([target[choice[c]] for c, target in zip(value.consumers, value.targets, strict=True)])
