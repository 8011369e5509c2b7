"""The few choices of each node that seem cheapest, where a problem repeats itself: of equal blocks in a row messages
pass over one, with those before and after it, and what they rank holds for all that are alike. The least over these few
is found in tables a thousandth as large. It is a plan near the least, mostly the least itself, and no bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem, Value, changed
from autoshard.solvers.common.effort import BUDGET_ENTRIES, FEW, FIRST, WIDE, WORK_PER_ENTRY
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.elimination.compress_blocks import Short, shortened
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax.trws_layouts import Beliefs

Array = TypeVar("Array", Floats, Integers)

_LONG = 5_000  # nodes that messages are slow for
MUCH_WORK = WORK_PER_ENTRY * BUDGET_ENTRIES  # joint entries: above, plans and weights are found over few choices
_WORK = 20.0  # joint entries of exact elimination, over the cube of the most choices: GPT-2's on three axes


def worthwhile(problem: Problem) -> bool:
    return _most(problem) > WIDE and len(problem.nodes) <= _LONG


def exact_work(problem: Problem) -> float:
    """Joint entries that exact elimination will minimise, roughly."""
    return _WORK * float(_most(problem)) ** 3


def _most(problem: Problem) -> int:
    return max((len(node.seconds) for node in problem.nodes), default=0)


def ranking(problem: Problem, beliefs: Beliefs) -> list[Integers]:
    """The choices of every node, what seems cheapest first: by the mean over nodes that are alike."""
    groups: dict[Hashable, list[int]] = {}
    for n, key in enumerate(kinds(problem)):
        groups.setdefault(key, []).append(n)
    order: list[Integers] = [np.zeros(0, np.int64)] * len(problem.nodes)
    for nodes in groups.values():
        costs = [beliefs.belief(n) for n in nodes]
        mean = sum((cost - cost.min() for cost in costs), start=np.zeros(len(costs[0])))
        best = np.argsort(mean, kind="stable")
        for n in nodes:
            order[n] = best
    return order


def kinds(problem: Problem) -> list[Hashable]:
    """Key of each node, equal for alike nodes: its costs, and the tables of its values."""
    ends: list[list[tuple[int, int, int]]] = [[] for _ in problem.nodes]
    for value in problem.values:
        ends[value.producer].append((id(value.seconds), -1, id(value.source)))
        for i, (c, target) in enumerate(zip(value.consumers, value.targets, strict=True)):
            ends[c].append((id(value.seconds), i, id(target)))
    return [(id(node.seconds), id(node.bytes), *sorted(links)) for node, links in zip(problem.nodes, ends, strict=True)]


def narrowed(problem: Problem, keep: Sequence[Integers]) -> Problem:
    """Problem with only the choices `keep[n]` of node n; what is equal and keeps the same goes on sharing arrays."""
    known: dict[Hashable, Any] = {}

    def part(array: Array, n: int) -> Array:
        key = (id(array), keep[n].tobytes())
        if key not in known:
            known[key] = array[keep[n]]
        selected: Array = known[key]
        return selected

    def value(old: Value) -> Value:
        targets = tuple(part(t, c) for c, t in zip(old.consumers, old.targets, strict=True))
        return changed(old, source=part(old.source, old.producer), targets=targets)

    nodes = tuple(
        changed(node, seconds=part(node.seconds, n), bytes=part(node.bytes, n)) for n, node in enumerate(problem.nodes)
    )
    return replace(problem, nodes=nodes, values=tuple(map(value, problem.values)))


class Near(NamedTuple):
    """The `value` of a `choice` that is the least over few choices of each node."""

    value: float
    choice: Choice


def solve_top_k(problem: Problem, budget_entries: int, count: int = FEW) -> Near | None:
    """Plan over the first few choices; None where nothing repeats, they exclude each other, or tables don't fit."""
    few = top_k_choices(problem, count)
    if few is None:
        return None
    part = narrowed(problem, few)
    try:
        minimum = minimum_within(part, Contents(part), budget_entries=budget_entries)
    except InfeasibleError:
        return None
    if minimum is None:
        return None
    return Near(minimum.bound, tuple(int(some[s]) for some, s in zip(few, minimum.choice, strict=True)))


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
    """Node of the short problem that stands for each node of the whole problem."""
    at = np.full(len(short.line.nodes), -1)
    at[short.positions] = np.arange(len(short.positions))
    for fold in short.folds:
        at[fold.position : fold.position + fold.count * fold.period] = np.tile(fold.block, fold.count)
    stand_ins: Integers = at[short.line.positions]
    return stand_ins
