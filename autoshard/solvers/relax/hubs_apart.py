"""Exact but for the hubs, values that nodes all over a problem read: a better plan and bound than shares of all values
leave, in about the time of one of their rounds.

A reader pays its even share of the layout that it needs of a hub, from the cheapest source. Layers then repeat, and
the minimum of the rest is a bound. What hubs are made of is chosen for the readers that this leaves: a plan.
"""

from __future__ import annotations

from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.effort import SOON_ENTRIES
from autoshard.solvers.common.incumbent import Incumbent
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
    minimum = attempt(minimum_within, part, Contents(part), budget_entries=SOON_ENTRIES)
    if minimum is None:
        return False
    state.raise_bound(minimum.bound)
    shares.take(state, minimum.choice, minimum.bound)
    return True
