"""Terms by variable while they are being eliminated, and the account of what that costs.

A *gate* is a small variable that decides which terms count. A strategy variable is eliminated once for each setting of
the gates around it, with the terms that count then: that keeps terms over few variables where one table for all
settings would be over many.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from autoshard.solvers.elimination.cost_tables import Cases, CostTerm, Store, TableRecipe

_MOST_SETTINGS = 64  # of the gates around one variable

Gates = tuple[tuple[int, int], ...]


class EliminationStep(NamedTuple):
    """A variable goes; `terms` are all that it was in."""

    variable: int
    terms: tuple[CostTerm, ...]


class TermGraph:
    """Mutable while an order is made. `generation[v]`: how often the neighbourhood of v has been folded."""

    def __init__(self, store: Store, terms: Sequence[CostTerm], domains: Sequence[int], gates: Collection[int]) -> None:
        self.store, self.domains, self.gates = store, tuple(domains), frozenset(gates)
        self.terms: dict[int, CostTerm] = {}
        self.of: list[set[int]] = [set() for _ in domains]
        self.generation = [0] * len(domains)
        self.steps: list[EliminationStep] = []
        self.tables: list[int] = []
        self.constants: list[int] = []
        self.entries = self.work = self.largest = self.next = 0
        self.exact = True
        for term in terms:
            self.add(term)

    def add(self, term: CostTerm) -> None:
        if not term.variables:
            self.constants.append(term.table)
            return
        self.terms[self.next] = term
        for variable in term.variables:
            self.of[variable].add(self.next)
        self.next += 1

    def neighbours(self, variable: int) -> set[int]:
        neighbours = {other for t in self.of[variable] for other in self.terms[t].variables}
        neighbours.discard(variable)
        return neighbours

    def cost(self, variable: int) -> int:
        """Joint entries that eliminating it takes."""
        terms = [self.terms[t] for t in self.of[variable]]
        if not self.gates or not any(term.gates for term in terms):
            return self.joint(variable, terms)[0]
        if self.settings(variable, terms) > _MOST_SETTINGS:
            return sys.maxsize
        return sum(self.joint(variable, active)[0] for _, active in self.by_setting(variable, terms))

    def left(self, variable: int) -> int:
        """Entries of the tables that eliminating it leaves."""
        terms = [self.terms[t] for t in self.of[variable]]
        if self.settings(variable, terms) > _MOST_SETTINGS:
            return sys.maxsize
        around = [self.joint(variable, active)[1] for _, active in self.by_setting(variable, terms)]
        return sum(math.prod(self.store.counts[map_] for map_ in joined.values()) for joined in around)

    def settings(self, variable: int, terms: Iterable[CostTerm]) -> int:
        return math.prod(self.domains[g] for g in {g for t in terms for g, _ in t.gates} if g != variable)

    def by_setting(self, variable: int, terms: Sequence[CostTerm]) -> Iterator[tuple[Gates, list[CostTerm]]]:
        """Settings of the other gates in `terms`, each with the terms that count under it."""
        gates = sorted({g for term in terms for g, _ in term.gates if g != variable}) if self.gates else []
        if not gates:
            yield (), list(terms)
            return
        for values in product(*(range(self.domains[g]) for g in gates)):
            fixed = dict(zip(gates, values, strict=True))
            yield tuple(fixed.items()), [t for t in terms if all(fixed.get(g, v) == v for g, v in t.gates)]

    def joint(self, variable: int, terms: Iterable[CostTerm]) -> tuple[int, dict[int, int]]:
        """Entries of the sum of terms, and the joined class map of each neighbour."""
        gate = variable in self.gates
        joined: dict[int, int] = {}
        several: dict[int, set[int]] = {}
        for term in terms:
            if gate or len(term.scope) > 1:
                for other, map_ in zip(term.scope, term.maps, strict=True):
                    known = joined.setdefault(other, map_)
                    if known != map_:
                        several.setdefault(other, {known}).add(map_)
        for other, ids in several.items():
            joined[other] = self.store.join(ids)
        work, counts = 1, self.store.counts
        for map_ in joined.values():
            work *= counts[map_]
        joined.pop(variable, None)
        return work * self.domains[variable] if gate else work, joined

    def eliminate(self, variable: int, limit: float) -> None:
        """Replaces the terms of a variable by their minimum over it, one for each setting of the gates around it."""
        numbers = sorted(self.of[variable])
        terms = tuple(self.terms[t] for t in numbers)
        for other in self.neighbours(variable):
            self.generation[other] = max(self.generation[other], self.generation[variable] + 1)
        for number in numbers:
            for other in self.terms.pop(number).variables:
                self.of[other].discard(number)
        self.steps.append(EliminationStep(variable, terms))
        for gates, active in self.by_setting(variable, terms):
            if variable in self.gates:
                self.add(self.least_case(variable, active)._replace(gates=gates))
                continue
            unary = tuple(term for term in active if len(term.scope) == 1)
            for bucket in self.buckets(variable, [term for term in active if len(term.scope) > 1], limit):
                self.add(self.least_strategy(variable, unary, bucket)._replace(gates=gates))
                unary = ()

    def buckets(self, variable: int, terms: list[CostTerm], limit: float) -> list[list[CostTerm]]:
        """All terms in one bucket where their joint table is within `limit`, else first fit by decreasing size."""
        if math.isinf(limit) or len(terms) < 2 or self.joint(variable, terms)[0] <= limit:
            return [terms]
        self.exact = False
        buckets: list[list[CostTerm]] = []
        sizes = [math.prod(self.store.counts[m] for m in term.maps) for term in terms]
        for i in sorted(range(len(terms)), key=lambda i: (-sizes[i], i)):
            for bucket in buckets:
                if self.joint(variable, [*bucket, terms[i]])[0] <= limit:
                    bucket.append(terms[i])
                    break
            else:
                buckets.append([terms[i]])
        return buckets

    def least_strategy(self, variable: int, unary: Sequence[CostTerm], joint: Sequence[CostTerm]) -> CostTerm:
        """The minimum of a bucket over a variable, as a term over its other variables."""
        work, joined = self.joint(variable, joint)
        scope = sorted(joined)
        slots = {other: slot for slot, other in enumerate(scope)} | {variable: -1}
        recipe = TableRecipe(
            self.domains[variable],
            tuple((term.table, term.maps[0]) for term in unary),
            tuple((term.table, _axes(term, slots)) for term in joint),
            tuple(joined[other] for other in scope),
        )
        return CostTerm(tuple(scope), recipe.out, self.numbered(recipe, work))

    def least_case(self, gate: int, terms: Sequence[CostTerm]) -> CostTerm:
        """The minimum over the values of a gate, as a term over all variables of the terms."""
        work, joined = self.joint(gate, terms)
        scope = sorted(joined)
        slots = {other: slot for slot, other in enumerate(scope)}
        values = tuple(
            tuple((term.table, _axes(term, slots)) for term in terms if (gate, value) in term.gates)
            for value in range(self.domains[gate])
        )
        recipe = Cases(values, tuple(joined[other] for other in scope))
        return CostTerm(tuple(scope), recipe.out, self.numbered(recipe, work))

    def numbered(self, recipe: TableRecipe | Cases, work: int) -> int:
        number, new = self.store.derived(recipe)
        if new:
            self.tables.append(number)
            self.entries += math.prod(self.store.counts[m] for m in recipe.out)
            self.work += work
            self.largest = max(self.largest, work)
        return number


def _axes(term: CostTerm, slots: dict[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((slots[variable], map_) for variable, map_ in zip(term.scope, term.maps, strict=True))
