"""Where exact tables are too large, often because all layers read a few values, such as those of a rotary table.

1. Messages (`trws_layouts.Beliefs`) bound the problem and rank its choices; that over the best few of each node gives a
   plan.
2. Choices that no plan better than that one has are left out, the same ones of nodes that are alike.
3. The hubs are cut off: a reader pays its even share of the layout that it needs, from the cheapest source. That is
   less than what is paid, and layers go on repeating. What is left is exact: a higher bound, and a plan that the hubs
   are given back to.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import MANY, Floats, Integers, Problem, objective
from autoshard.solvers.common.effort import (
    BUDGET_ENTRIES,
    CLOSE,
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
from autoshard.solvers.relax.restricted_start import kinds, narrowed, ranking
from autoshard.solvers.relax.trws_layouts import Beliefs
from autoshard.units import ROUNDING

_CHEAP = 0.1  # of what values of several readers mostly cost; of the cheaper, those with the most readers are hubs too
_FEWER = 0.5  # of all choices: are so many left, the whole problem is tried once more
_FEW = (FEW, FEW // 2, FEW // 3)  # choices of each node in a first plan


def bounded(
    state: Incumbent, budget: int, clock: Clock, beliefs: Beliefs | None = None, loose: float = ROUNDING
) -> Minimum | None:
    """A good plan with a bound near it; None where the few choices that seem best exclude each other.

    What is found on the way is left in `state`, of the same problem. `beliefs`: of rounds before. `loose`: the relative
    gap of messages that is worth exact tables.
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
        best = _best(problem, best, state.choice)
    bound = beliefs.bound
    if not (clock.over or objective(problem, best) - bound <= loose * abs(bound)):
        best, bound = _closer(problem, beliefs, best, budget)
    return Minimum(bound, best, False)


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


def _among(problem: Problem, ranked: Sequence[Integers], *known: Choice) -> Choice | None:
    """The best plan over those of `known` and the first few choices of each node, as many as tables are small for."""
    for few in _FEW:
        keep = [np.unique([*some[:few], *also]) for some, *also in zip(ranked, *known, strict=True)]
        part = narrowed(problem, keep)
        try:
            found = minimum_within(part, Contents(part), budget_entries=SMALL_ENTRIES)
        except InfeasibleError:
            return None
        if found is not None:
            choice = polished(problem, _whole(keep, found.choice))
            return choice if math.isfinite(objective(problem, choice)) else None
    return None


def _closer(problem: Problem, beliefs: Beliefs, best: Choice, budget: int) -> tuple[Choice, float]:
    """A choice at least as good as `best`, and a bound at least that of the messages."""
    value = objective(problem, best)
    kept = undercutting(problem, beliefs, best, value)
    if sum(map(len, kept)) <= _FEWER * sum(len(node.seconds) for node in problem.nodes):
        small = narrowed(problem, kept)
        exact = minimum_within(small, Contents(small), budget_entries=budget)
        if exact is not None and exact.exact:
            return _best(problem, best, _whole(kept, exact.choice)), min(value, exact.bound)
    if value - beliefs.bound <= CLOSE * abs(value):
        return best, beliefs.bound
    small = narrowed(cut_off(problem, kept), kept)
    relaxed = minimum_within(small, Contents(small), budget_entries=budget)
    if relaxed is None:
        return best, beliefs.bound
    bound = max(beliefs.bound, min(value, relaxed.bound))
    other = polished(problem, _whole(kept, relaxed.choice))
    mixed = _among(problem, ranking(problem, beliefs), best, other)
    return _best(problem, best, other, *([mixed] if mixed else [])), bound


def _whole(kept: Sequence[Integers], choice: Choice) -> Choice:
    return tuple(int(some[s]) for some, s in zip(kept, choice, strict=True))


def _best(problem: Problem, *choices: Choice) -> Choice:
    return min(choices, key=lambda choice: objective(problem, choice))


def undercutting(problem: Problem, beliefs: Beliefs, best: Choice, value: float) -> list[Integers]:
    """The choices of each node that a plan of less than `value` may have, and those of `best`; alike for like nodes."""
    limit = value + ROUNDING * abs(value)
    stays = [least <= limit for least in beliefs.marginals()]
    for flags, s in zip(stays, best, strict=True):
        flags[s] = True
    groups: dict[Hashable, list[int]] = {}
    for n, kind in enumerate(kinds(_without(problem, hubs(problem)))):
        groups.setdefault(kind, []).append(n)
    kept: list[Integers] = [np.zeros(0, np.int64)] * len(stays)
    for nodes in groups.values():
        some = np.flatnonzero(np.any([stays[n] for n in nodes], axis=0))
        for n in nodes:
            kept[n] = some
    return kept


def hubs(problem: Problem) -> frozenset[int]:
    """The values to cut off."""
    low = cheap(problem)
    readers = [len(value.consumers) for value in problem.values]
    most = max((readers[v] for v in low), default=0)
    return frozenset(v for v, count in enumerate(readers) if count > MANY or (v in low and count == most))


def cheap(problem: Problem) -> frozenset[int]:
    """The values of several readers that can cost little beside what such values mostly can."""
    tables = {id(value.seconds): value.seconds for value in problem.values}
    known = {key: float(table[np.isfinite(table)].max(initial=0.0)) for key, table in tables.items()}
    shared = {v: known[id(value.seconds)] for v, value in enumerate(problem.values) if len(value.consumers) > 1}
    limit = _CHEAP * float(np.median(list(shared.values()) or [0.0]))
    return frozenset(v for v, most in shared.items() if most < limit)


def _without(problem: Problem, gone: frozenset[int]) -> Problem:
    return replace(problem, values=tuple(value for v, value in enumerate(problem.values) if v not in gone))


def cut_off(problem: Problem, kept: Sequence[Integers]) -> Problem:
    """The problem without hubs: each reader pays an even share of its layout from the cheapest source. Its minimum is a
    bound of the whole problem's over the choices `kept`."""
    seconds = [node.seconds for node in problem.nodes]
    known: dict[Hashable, Floats] = {}
    gone = hubs(problem)
    for v in sorted(gone):
        value = problem.values[v]
        sources = np.unique(value.source[kept[value.producer]])
        least = value.seconds[sources].min(axis=0) / len(value.consumers)
        for c, targets in zip(value.consumers, value.targets, strict=True):
            key = (id(seconds[c]), id(targets), v)
            if key not in known:
                known[key] = seconds[c] + least[targets]
            seconds[c] = known[key]
    nodes = tuple(replace(node, seconds=own) for node, own in zip(problem.nodes, seconds, strict=True))
    return replace(_without(problem, gone), nodes=nodes)
