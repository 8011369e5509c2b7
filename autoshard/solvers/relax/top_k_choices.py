"""The few choices of each node that seem cheapest, where a problem repeats itself: of equal blocks in a row messages
pass over one, with those before and after it, and what they rank holds for all that are alike. The least over these few
is found in tables a thousandth as large. It is a plan near the least, mostly the least itself, and no bound."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem
from autoshard.solvers.common.effort import FEW, FIRST
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.elimination.compress_blocks import Short, shortened
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax.restricted_start import kinds, narrowed, ranking
from autoshard.solvers.relax.trws_layouts import Beliefs


class Near(NamedTuple):
    """The `value` of a `choice` that is the least over few choices of each node."""

    value: float
    choice: Choice


def solve_top_k(problem: Problem, budget_entries: int, count: int = FEW) -> Near | None:
    """None where nothing repeats, the few exclude each other, or their tables don't fit."""
    few = top_k_choices(problem, count)
    if few is None:
        return None
    part = narrowed(problem, few)
    try:
        found = minimum_within(part, Contents(part), budget_entries=budget_entries)
    except InfeasibleError:
        return None
    if found is None:
        return None
    return Near(found.bound, tuple(int(some[s]) for some, s in zip(few, found.choice, strict=True)))


def top_k_choices(problem: Problem, count: int, prices: Floats | None = None) -> list[Integers] | None:
    """At most `count` choices of each node, the same for nodes that are alike; None where nothing repeats.

    `prices`: seconds that a byte costs, over time."""
    short = shortened(additive(problem, prices), Contents(problem), rounds=0)  # no domain is reduced here
    if short is None:
        return None
    beliefs = Beliefs(additive(short.problem, prices), np.float32)
    for _ in range(FIRST):
        beliefs.round()
    ranked = ranking(short.problem, beliefs)
    few: dict[Hashable, Integers] = {}
    alike = kinds(problem)
    for kind, stand_in in zip(alike, _stand_ins(short), strict=True):
        few.setdefault(kind, np.sort(ranked[stand_in][:count]))
    return [few[kind] for kind in alike]


def _stand_ins(short: Short) -> Integers:
    """For each node of the whole problem the one of the short problem that stands for it."""
    at = np.full(len(short.line.nodes), -1)
    at[short.positions] = np.arange(len(short.positions))
    for fold in short.folds:
        at[fold.position : fold.position + fold.count * fold.period] = np.tile(fold.block, fold.count)
    found: Integers = at[short.line.positions]
    return found
