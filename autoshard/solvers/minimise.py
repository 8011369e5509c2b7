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
from autoshard.solvers.encode import Encoded, Style, encode
from autoshard.solvers.tables import Contents, Store

BUDGET_ENTRIES = 300_000_000  # 8 bytes each, of all tables together
_WORK_PER_ENTRY = 8  # joint entries minimised per entry of the budget: the limit on time
_TERM_SHARE = 16  # the largest term that is written down is this part of the budget
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
        fitting.append(candidate)
        if candidate[2].work <= _EASY and not candidate[1].relaxed:
            break
    if fitting:
        return min(fitting, key=lambda candidate: (len(candidate[1].relaxed), candidate[2].work))
    return _bounding(sum_, kept, contents, budget)


def _candidates(sum_: Additive, kept: Sequence[Integers], contents: Contents, budget: int) -> Iterator[_Candidate]:
    """Those that fit, in the order in which they are worth trying."""
    most = max((len(value.consumers) for value in sum_.problem.values), default=1)
    styles: list[Style] = ["product"]
    styles += ["gates"] if most > 1 else []
    styles += ["sets"] if most > 2 else []
    keys: tuple[order.Key, ...] = ("size", "fill")
    for style in styles:
        store = Store()
        encoded = encode(store, sum_, kept, contents, budget // _TERM_SHARE, style)
        if encoded.relaxed and style == "product" and len(styles) > 1:
            continue
        for key in keys:
            fork = store.fork()
            plan = order.plan(
                fork, encoded.terms, encoded.domains, key, gates=encoded.gates, most_work=_WORK_PER_ENTRY * budget
            )
            if plan is not None and plan.entries <= budget:
                yield fork, encoded, plan


def _bounding(sum_: Additive, kept: Sequence[Integers], contents: Contents, budget: int) -> _Candidate:
    """Smaller and smaller tables until a bound fits: terms first, then the mini-buckets."""
    limit = budget // _TERM_SHARE
    while True:
        store = Store()
        encoded = encode(store, sum_, kept, contents, limit, "sets")
        plan = order.plan(store, encoded.terms, encoded.domains, "size", limit=limit)
        assert plan is not None
        if limit <= 1 or (plan.entries <= budget and plan.work <= _WORK_PER_ENTRY * budget):
            return store, encoded, plan
        limit //= 8
