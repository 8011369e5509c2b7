"""Choice of encoding and elimination order: the least work of a few that fit, or a bound that fits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from autoshard.ir.problem import Integers
from autoshard.solvers.common.effort import SOON_ENTRIES, WORK_PER_ENTRY
from autoshard.solvers.elimination import elimination_order
from autoshard.solvers.elimination.cost_tables import Contents, CostTerm, Store
from autoshard.solvers.elimination.factor_encoding import Encoded, Style, encode, has_hub
from autoshard.solvers.elimination.weighted_sum import Additive

_TERM_SHARE = 16  # the largest term that is written down is this part of the budget

Candidate = tuple[Store, Encoded, elimination_order.Elimination]
KEYS: tuple[elimination_order.Key, ...] = ("size", "left")


def best(sum_: Additive, choices: Sequence[Integers], contents: Contents, budget: int) -> Candidate | None:
    """The least work of those that fit the budget exactly; None where none does."""
    candidates: list[Candidate] = []
    for store, encoded in encodings(sum_, choices, contents, budget):
        for key in KEYS:
            fork = store.fork()
            plan = fitting(fork, encoded, encoded.terms, key, budget)
            if plan is not None:
                candidates.append((fork, encoded, plan))
                if plan.work <= SOON_ENTRIES and not encoded.relaxed:
                    return candidates[-1]
    return min(candidates, key=lambda candidate: (len(candidate[1].relaxed), candidate[2].work), default=None)


def encodings(
    sum_: Additive, choices: Sequence[Integers], contents: Contents, budget: int, *, exact: bool = False
) -> Iterator[tuple[Store, Encoded]]:
    """Encodings in the order in which they are worth trying. `exact`: those in which no value is relaxed alone."""
    most = max((len(value.consumers) for value in sum_.problem.values), default=1)
    styles: list[Style] = ["product"]
    styles += ["gates"] if most > 1 else []
    styles += ["shares"] if has_hub(sum_.problem) else []
    styles += ["sets"] if most > 2 else []
    for style in styles:
        store, whole = Store(), exact or (style == "product" and len(styles) > 1)
        encoded = encode(store, sum_, choices, contents, budget // _TERM_SHARE, style, exact=whole)
        if encoded is not None:
            yield store, encoded


def fitting(
    store: Store,
    encoded: Encoded,
    terms: Sequence[CostTerm],
    key: elimination_order.Key,
    budget: int,
    variables: Collection[int] | None = None,
) -> elimination_order.Elimination | None:
    """An elimination of some terms of an encoding within the budget; None where this order has none."""
    most = WORK_PER_ENTRY * budget
    plan = elimination_order.plan(
        store, terms, encoded.domains, key, gates=encoded.gates, most_work=most, variables=variables
    )
    return plan if plan is not None and plan.entries <= budget else None


def bounding(sum_: Additive, choices: Sequence[Integers], contents: Contents, budget: int) -> Candidate:
    """Smaller and smaller tables until a bound fits: terms first, then the mini-buckets."""
    limit = budget // _TERM_SHARE
    while True:
        store = Store()
        encoded = encode(store, sum_, choices, contents, limit, "sets")
        assert encoded is not None
        plan = elimination_order.plan(store, encoded.terms, encoded.domains, "size", limit=limit)
        assert plan is not None
        if limit <= 1 or (plan.entries <= budget and plan.work <= WORK_PER_ENTRY * budget):
            return store, encoded, plan
        limit //= 8
