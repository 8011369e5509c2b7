"""Relaxation for exact tables that are too large, often because all layers read a few values, as of a rotary table.

Messages (`trws_layouts.Beliefs`) bound the problem and rank its choices; the problem over the best few of each node
gives a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Integers, Problem, objective
from autoshard.solvers.common.effort import (
    BUDGET_ENTRIES,
    FEW,
    MOST_ROUNDS,
    ROUNDS,
    SMALL_ENTRIES,
    WORK_PER_ENTRY,
)
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.local_search import Choice, polished
from autoshard.solvers.common.solver_options import Clock
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import Minimum, minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax.restricted_start import narrowed, ranking
from autoshard.solvers.relax.trws_layouts import Beliefs

_FEW = (FEW, FEW // 2, FEW // 3)  # choices of each node in a first plan


def bounded(state: Incumbent, clock: Clock, beliefs: Beliefs | None = None) -> Minimum | None:
    """A good plan with a bound; None where the few choices that seem best exclude each other.

    What is found on the way is left in `state`, of the same problem. `beliefs`: of rounds before.
    """
    problem = state.problem
    beliefs = beliefs or Beliefs(additive(problem))
    while beliefs.rounds < MOST_ROUNDS and not clock.over:
        state.raise_bound(beliefs.round())
        beliefs.shift()
    best = _among(problem, ranking(problem, beliefs))
    if best is None:
        return None
    state.offer(best)
    if state.choice is not None:
        best = min(best, state.choice, key=lambda choice: objective(problem, choice))
    return Minimum(beliefs.bound, best, False)


def as_messages(problem: Problem, least: int) -> int:
    """The budget of entries, `least` at least, with which exact tables take no more steps than messages do."""
    passed = 2 * MOST_ROUNDS * sum(value.seconds.size * len(value.consumers) for value in problem.values)
    return min(BUDGET_ENTRIES, max(least, passed // WORK_PER_ENTRY))


def sketched(state: Incumbent) -> None:
    """A good plan soon, of few rounds of messages and the few choices that these rank first. Leaves none where those
    exclude each other or don't fit."""
    beliefs = Beliefs(additive(state.problem))
    for _ in range(ROUNDS):
        state.raise_bound(beliefs.round())
        beliefs.shift()
    state.offer(_among(state.problem, ranking(state.problem, beliefs)))


def _among(problem: Problem, ranked: Sequence[Integers]) -> Choice | None:
    """The best plan over the first few choices of each node, as many as tables are small for."""
    for few in _FEW:
        keep = [np.sort(some[:few]) for some in ranked]
        part = narrowed(problem, keep)
        try:
            minimum = minimum_within(part, Contents(part), budget_entries=SMALL_ENTRIES)
        except InfeasibleError:
            return None
        if minimum is not None:
            choice = polished(problem, tuple(int(some[s]) for some, s in zip(keep, minimum.choice, strict=True)))
            return choice if math.isfinite(objective(problem, choice)) else None
    return None
