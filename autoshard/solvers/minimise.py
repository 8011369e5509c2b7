"""The minimum of an additive problem: reduce, encode, order, eliminate; or a lower bound of it within a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import InfeasibleError
from autoshard.problem import Floats, Integers, Problem
from autoshard.solvers import eliminate
from autoshard.solvers.additive import Additive, additive
from autoshard.solvers.around import around
from autoshard.solvers.choose import best
from autoshard.solvers.domains import reduce
from autoshard.solvers.fold import solve_short
from autoshard.solvers.shorten import shortened
from autoshard.solvers.tables import Contents

BUDGET_ENTRIES = 300_000_000  # 8 bytes each, of all tables together


@dataclass(frozen=True, eq=False)
class Minimum:
    """`bound` <= the minimum of an additive problem; `choice` attains it where `exact`.

    `relaxed`: values of which only a bound was encoded. `work`: joint entries that were minimised.
    """

    bound: float
    choice: tuple[int, ...]
    exact: bool
    relaxed: tuple[int, ...]
    work: int


def minimise(
    problem: Problem,
    contents: Contents,
    *,
    multipliers: Floats | None = None,
    scale: float = 1.0,
    allowed: Sequence[Integers] | None = None,
    shares: Mapping[int, Floats] | None = None,
    budget_entries: int = BUDGET_ENTRIES,
) -> Minimum:
    """Minimises scale x seconds + sum over t of multipliers[t] x memory(t), without a limit on memory.

    `allowed`: the strategies of each node that may be used; `shares`: see Additive. `contents` is made of `problem`.
    Raises InfeasibleError where no allowed combination exists.
    """
    sum_ = additive(problem, multipliers, scale)
    sum_ = Additive(problem, scale, sum_.cumulative, shares or {})
    if allowed is None and not shares:
        short = shortened(sum_, contents)
        folded = solve_short(sum_, short, contents, budget_entries) if short else None
        if folded is not None:
            return Minimum(folded.value, folded.choice, True, (), folded.work)
    few = around(sum_, allowed) if allowed is not None else None
    if few is None or allowed is None:
        return _minimum(sum_, contents, allowed, budget_entries)
    there = Additive(few.part, scale, sum_.cumulative, few.shares)
    found = _minimum(there, contents, few.allowed, budget_entries)
    relaxed = tuple(few.values[v] for v in found.relaxed)
    return Minimum(found.bound + few.cost, few.whole(found.choice, allowed), found.exact, relaxed, found.work)


def _minimum(sum_: Additive, contents: Contents, allowed: Sequence[Integers] | None, budget_entries: int) -> Minimum:
    kept = reduce(sum_, contents, allowed)
    store, encoded, plan = best(sum_, kept, contents, budget_entries)
    bound = eliminate.run(store, plan)
    if math.isinf(bound):
        raise InfeasibleError("every combination of strategies is forbidden: no strategies of all nodes go together")
    picked = eliminate.backtrack(store, plan)
    choice = tuple(int(some[s]) for some, s in zip(kept, picked, strict=False))
    return Minimum(bound, choice, plan.exact and not encoded.relaxed, encoded.relaxed, plan.work)
