"""The elimination order, and with it the size of every table, before anything is computed.

Greedy, by one of two keys: fewest new neighbour pairs ("fill"), or the smallest joint table ("size"). Ties go to the
variable whose neighbourhood is least eliminated, so that repeated blocks are all folded before any two are joined, then
to the lowest index. Where even the smallest joint table is above `limit` the terms are split into mini-buckets, each
minimised by itself: the minimum is then a lower bound only, and the plan says `exact=False`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autoshard.solvers.tables import Recipe, Store, Term

Key = Literal["size", "fill"]


class Step(NamedTuple):
    """A variable goes; `terms` are all that it was in."""

    variable: int
    terms: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class Elimination:
    """`tables`: numbers of the distinct tables to compute, in order; `constants`: the tables without axes, whose sum is
    the minimum. `entries`: their sizes; `work`: entries of all joint tables that are minimised; `largest`: of one.
    """

    domains: tuple[int, ...]
    steps: tuple[Step, ...]
    tables: tuple[int, ...]
    constants: tuple[int, ...]
    entries: int
    work: int
    largest: int
    exact: bool


def plan(store: Store, terms: Sequence[Term], domains: Sequence[int], limit: float, key: Key) -> Elimination:
    """Eliminates every variable in greedy order. No joint table has more than `limit` entries, unless a term has."""
    graph = _Graph(store, terms, domains)
    heap = [(graph.priority(v, key), v) for v in range(len(domains))]
    heapq.heapify(heap)
    current: dict[int, object] = {v: priority for priority, v in heap}
    while heap:
        priority, variable = heapq.heappop(heap)
        if current.get(variable) != priority:
            continue
        del current[variable]
        for touched in graph.eliminate(variable, limit, key):
            renewed = graph.priority(touched, key)
            if current[touched] != renewed:
                current[touched] = renewed
                heapq.heappush(heap, (renewed, touched))
    return graph.finished()


class _Graph:
    """The terms that are left, by variable, and the account of what elimination will cost."""

    def __init__(self, store: Store, terms: Sequence[Term], domains: Sequence[int]) -> None:
        self.store, self.domains = store, tuple(domains)
        self.terms: dict[int, Term] = {}
        self.of: list[set[int]] = [set() for _ in domains]
        self.generation = [0] * len(domains)
        self.steps: list[Step] = []
        self.tables: list[int] = []
        self.constants: list[int] = []
        self.entries = self.work = self.largest = self.next = 0
        self.exact = True
        for term in terms:
            self.add(term)

    def add(self, term: Term) -> None:
        if not term.scope:
            self.constants.append(term.table)
            return
        self.terms[self.next] = term
        for variable in term.scope:
            self.of[variable].add(self.next)
        self.next += 1

    def neighbours(self, variable: int) -> set[int]:
        found = {other for t in self.of[variable] for other in self.terms[t].scope}
        found.discard(variable)
        return found

    def priority(self, variable: int, key: Key) -> tuple[int, int, int]:
        work, _ = self.joint(variable, [self.terms[t] for t in self.of[variable]])
        level = work.bit_length()
        first = self.fill(variable) * 1000 + level if key == "fill" else level
        return first, self.generation[variable], variable

    def fill(self, variable: int) -> int:
        """Pairs of neighbours that share no term yet."""
        around = self.neighbours(variable)
        linked = sum(len(self.neighbours(other) & around) for other in around)
        return (len(around) * (len(around) - 1) - linked) // 2

    def joint(self, variable: int, terms: Iterable[Term]) -> tuple[int, dict[int, int]]:
        """Entries of the sum of terms, and the joined class map of each neighbour."""
        maps: dict[int, set[int]] = {}
        for term in terms:
            if len(term.scope) > 1:
                for other, map_ in zip(term.scope, term.maps, strict=True):
                    maps.setdefault(other, set()).add(map_)
        joined = {other: self.store.join(ids) for other, ids in maps.items()}
        work = math.prod(self.store.counts[map_] for map_ in joined.values())
        joined.pop(variable, None)
        return work, joined

    def eliminate(self, variable: int, limit: float, key: Key) -> set[int]:
        """Replaces the terms of a variable by their minimum over it; returns whose priority may have changed."""
        numbers = sorted(self.of[variable])
        terms = tuple(self.terms[t] for t in numbers)
        around = self.neighbours(variable)
        before = {other: self.neighbours(other) for other in around} if key == "fill" else {}
        for number in numbers:
            for other in self.terms.pop(number).scope:
                self.of[other].discard(number)
        self.steps.append(Step(variable, terms))
        unary = tuple(term for term in terms if len(term.scope) == 1)
        for bucket in self.buckets(variable, [term for term in terms if len(term.scope) > 1], limit):
            self.add(self.minimum(variable, unary, bucket))
            unary = ()
        for other in around:
            self.generation[other] = max(self.generation[other], self.generation[variable] + 1)
        return around | self._refilled(around, before)

    def _refilled(self, around: set[int], before: dict[int, set[int]]) -> set[int]:
        """With the fill key: variables next to two ends of a new pair."""
        touched: set[int] = set()
        for other, old in before.items():
            for new in (self.neighbours(other) & around) - old:
                touched |= self.neighbours(other) & self.neighbours(new)
        return touched

    def buckets(self, variable: int, terms: list[Term], limit: float) -> list[list[Term]]:
        """All terms in one bucket where their joint table is within `limit`, else first fit by decreasing size."""
        if self.joint(variable, terms)[0] <= limit or len(terms) < 2:
            return [terms]
        self.exact = False
        buckets: list[list[Term]] = []
        sizes = [math.prod(self.store.counts[m] for m in term.maps) for term in terms]
        for i in sorted(range(len(terms)), key=lambda i: (-sizes[i], i)):
            for bucket in buckets:
                if self.joint(variable, [*bucket, terms[i]])[0] <= limit:
                    bucket.append(terms[i])
                    break
            else:
                buckets.append([terms[i]])
        return buckets

    def minimum(self, variable: int, unary: Sequence[Term], joint: Sequence[Term]) -> Term:
        """The term that a bucket leaves over its other variables."""
        work, joined = self.joint(variable, joint)
        scope = sorted(joined)
        slots = {other: slot for slot, other in enumerate(scope)} | {variable: -1}
        recipe = Recipe(
            self.domains[variable],
            tuple((term.table, term.maps[0]) for term in unary),
            tuple((t.table, tuple((slots[v], m) for v, m in zip(t.scope, t.maps, strict=True))) for t in joint),
            tuple(joined[other] for other in scope),
        )
        number, new = self.store.derived(recipe)
        if new:
            self.tables.append(number)
            self.entries += math.prod(self.store.counts[m] for m in recipe.out)
            self.work += work
            self.largest = max(self.largest, work)
        return Term(tuple(scope), recipe.out, number)

    def finished(self) -> Elimination:
        return Elimination(
            domains=self.domains,
            steps=tuple(self.steps),
            tables=tuple(self.tables),
            constants=tuple(self.constants),
            entries=self.entries,
            work=self.work,
            largest=self.largest,
            exact=self.exact,
        )
