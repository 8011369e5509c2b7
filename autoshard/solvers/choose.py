"""Which encoding and which elimination order: the least work of a few that fit, or a bound that fits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from autoshard.problem import Integers
from autoshard.solvers import order
from autoshard.solvers.additive import Additive
from autoshard.solvers.encode import Encoded, Style, encode
from autoshard.solvers.tables import Contents, Store, Term

_WORK_PER_ENTRY = 8  # joint entries minimised per entry of the budget: the limit on time
_TERM_SHARE = 16  # the largest term that is written down is this part of the budget
_EASY = 20_000_000  # joint entries: not worth looking for a better order

Candidate = tuple[Store, Encoded, order.Elimination]
More = Callable[[Store], list[Term]]


def best(sum_: Additive, kept: Sequence[Integers], contents: Contents, budget: int) -> Candidate:
    """The least work of those that fit the budget exactly; else a bound that fits."""
    return fitting(sum_, kept, contents, budget) or _bounding(sum_, kept, contents, budget)


def fitting(
    sum_: Additive,
    kept: Sequence[Integers],
    contents: Contents,
    budget: int,
    *,
    stay: Collection[int] = (),
    more: More | None = None,
) -> Candidate | None:
    """The least work of those that fit the budget, None where none does. The variables of `stay` are not eliminated.

    `more` makes further terms in a store, over the variables of the problem's nodes.
    """
    found: list[Candidate] = []
    for candidate in _candidates(sum_, kept, contents, budget, stay, more):
        found.append(candidate)
        if candidate[2].work <= _EASY and not candidate[1].relaxed:
            break
    return min(found, key=lambda candidate: (len(candidate[1].relaxed), candidate[2].work)) if found else None


def _candidates(
    sum_: Additive,
    kept: Sequence[Integers],
    contents: Contents,
    budget: int,
    stay: Collection[int],
    more: More | None,
) -> Iterator[Candidate]:
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
        terms = [*encoded.terms, *(more(store) if more else ())]
        for key in keys:
            fork = store.fork()
            plan = order.plan(
                fork,
                terms,
                encoded.domains,
                key,
                gates=encoded.gates,
                most_work=_WORK_PER_ENTRY * budget,
                stay=stay,
            )
            if plan is not None and plan.entries <= budget:
                yield fork, encoded, plan


def _bounding(sum_: Additive, kept: Sequence[Integers], contents: Contents, budget: int) -> Candidate:
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
