"""The minimum of an additive problem: reduce, encode, order, eliminate; or a lower bound of it within a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import InfeasibleError
from autoshard.problem import Floats, Integers, Problem
from autoshard.solvers import eliminate, order
from autoshard.solvers.additive import Additive, additive
from autoshard.solvers.domains import reduce
from autoshard.solvers.encode import Encoded, encode
from autoshard.solvers.tables import Contents, Store

BUDGET_ENTRIES = 300_000_000  # 8 bytes each, of all tables together
_WORK_PER_ENTRY = 64  # joint entries minimised per entry of the budget: the limit on time
_EASY = 20_000_000  # joint entries: not worth looking for a better order


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
    kept = reduce(sum_, contents, allowed)
    store, encoded, plan = _best_plan(sum_, kept, contents, budget_entries)
    bound = eliminate.run(store, plan)
    if math.isinf(bound):
        raise InfeasibleError("every combination of strategies is forbidden: no strategies of all nodes go together")
    picked = eliminate.backtrack(store, plan)
    choice = tuple(int(some[s]) for some, s in zip(kept, picked, strict=False))
    return Minimum(bound, choice, plan.exact and not encoded.relaxed, encoded.relaxed, plan.work)


_Candidate = tuple[Store, Encoded, order.Elimination]


def _best_plan(sum_: Additive, kept: Sequence[Integers], contents: Contents, budget: int) -> _Candidate:
    """The least work of those that fit the budget exactly; else a bound that fits."""
    fitting: list[_Candidate] = []
    for candidate in _candidates(sum_, kept, contents, budget):
        _, encoded, plan = candidate
        if _fits(plan, budget) and not encoded.relaxed:
            fitting.append(candidate)
            if plan.work <= _EASY:
                break
    if fitting:
        return min(fitting, key=lambda candidate: candidate[2].work)
    return _bounding(sum_, kept, contents, budget)


def _candidates(sum_: Additive, kept: Sequence[Integers], contents: Contents, budget: int) -> Iterator[_Candidate]:
    several = any(len(value.consumers) > 2 for value in sum_.problem.values)
    for prefer_sets in (False, True) if several else (False,):
        store = Store()
        encoded = encode(store, sum_, kept, contents, budget, prefer_sets)
        keys: tuple[order.Key, ...] = ("size", "fill")
        for key in keys:
            fork = store.fork()
            yield fork, encoded, order.plan(fork, encoded.terms, encoded.domains, float("inf"), key)


def _bounding(sum_: Additive, kept: Sequence[Integers], contents: Contents, budget: int) -> _Candidate:
    """Smaller and smaller tables until a bound fits: terms first, then the mini-buckets."""
    limit = budget // 8
    while True:
        store = Store()
        encoded = encode(store, sum_, kept, contents, limit, prefer_sets=True)
        plan = order.plan(store, encoded.terms, encoded.domains, limit, "size")
        if _fits(plan, budget) or limit <= 1:
            return store, encoded, plan
        limit //= 8


def _fits(plan: order.Elimination, budget: int) -> bool:
    return plan.entries <= budget and plan.work <= _WORK_PER_ENTRY * budget
