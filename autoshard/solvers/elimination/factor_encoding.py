"""The additive problem as terms. A value is written at the level of layouts, in the first form that is affordable:

- product: one term over (producer, all consumers), the sum over distinct targets spelt out. For 1 or 2 consumers.
- set: a new variable, the set of layouts the value is made in; each consumer's layout must be in it. All terms are then
  over two variables. Exact because nothing made costs less than nothing; bytes of several keepers are split (a bound).
- gates: consumer i has a new small variable: it pays for its layout, or it takes over that of a later consumer j,
  which must then be equal. All terms are over two variables and a gate. Exact for the same reason, where the spans over
  which consumers keep the value are nested (else the hull of a shared one is not charged: a bound).
- relaxed: each consumer pays an even share of its target. A lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import MANY, Floats, Integers, Problem, Value
from autoshard.solvers.common.clock import Pace
from autoshard.solvers.elimination.cost_tables import Contents, CostTerm, Store
from autoshard.solvers.elimination.weighted_sum import Additive, charge, hull, scaled, span_of, unary

Flags = NDArray[np.bool_]
Style = Literal["product", "sets", "gates", "shares"]  # the form that is preferred; shares: gates, but of hubs
_MOST_SETS = 1 << 14
_MOST_AXES = 32  # of a table: numpy 1 has no more


@dataclass(frozen=True, eq=False)
class Encoded:
    """Variables 0..nodes-1 are the nodes (domain: the kept strategies), the rest are sets of layouts or `gates`.

    `origins`: of each term the value that it is of, or -1 for the cost of a node.
    `relaxed`: indices of the values of which only a lower bound is in the terms.
    """

    terms: tuple[CostTerm, ...]
    origins: tuple[int, ...]
    domains: tuple[int, ...]
    gates: frozenset[int]
    relaxed: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _KeptEnds:
    """A value restricted to the kept strategies: the distinct layouts at each end, and which strategy has which.

    `rows`: source layouts; `columns[i]`: target layouts of consumer i; `maps`: class maps of (producer, *consumers).
    """

    value: Value
    rows: Integers
    columns: tuple[Integers, ...]
    maps: tuple[Integers, ...]

    @property
    def scope(self) -> tuple[int, ...]:
        return (self.value.producer, *self.value.consumers)


def has_hub(problem: Problem) -> bool:
    """True if a value has so many consumers that shares of it are worth trying."""
    return any(len(value.consumers) > MANY for value in problem.values)


def encode(
    store: Store,
    sum_: Additive,
    choices: Sequence[Integers],
    contents: Contents,
    largest: float,
    style: Style,
    *,
    exact: bool = False,
) -> Encoded | None:
    """Terms of at most `largest` entries, in the preferred form where that is possible and smaller. `exact`: None as
    soon as a value must be relaxed."""
    return _Encoder(store, sum_, choices, contents, largest, style).encoded(exact)


class _Encoder:
    def __init__(
        self,
        store: Store,
        sum_: Additive,
        choices: Sequence[Integers],
        contents: Contents,
        largest: float,
        style: Style,
    ) -> None:
        self.store, self.sum, self.choices, self.contents = store, sum_, choices, contents
        self.largest, self.style = largest, style
        self.terms: list[CostTerm] = []
        self.domains = [len(some) for some in choices]
        self.gates: list[int] = []
        self.relaxed: list[int] = []
        self.known: dict[tuple[object, ...], int] = {}
        self.sets: dict[tuple[object, ...], list[int]] = {}
        self.merged: dict[int, tuple[int, list[Integers]]] = {}
        self.products: dict[tuple[object, ...], CostTerm | None] = {}

    def encoded(self, exact: bool) -> Encoded | None:
        tables: dict[tuple[int, float, int, int], tuple[tuple[int, ...], int]] = {}
        for n, (node, some) in enumerate(zip(self.sum.problem.nodes, self.choices, strict=True)):
            alike = (id(node.seconds), charge(self.sum, node.interval), id(node.bytes), id(some))
            if alike not in tables:
                every = self.store.map_id(np.arange(len(some)))
                tables[alike] = (every,), self.store.base(unary(self.sum, n)[some])
            self.terms.append(CostTerm((n,), *tables[alike]))
        origins = [-1] * len(self.terms)
        pace = Pace(len(self.sum.problem.values))
        for v, value in enumerate(self.sum.problem.values):
            pace.step(v)
            self.add_value(v, value)
            if exact and self.relaxed:
                return None
            origins += [v] * (len(self.terms) - len(origins))
        return Encoded(
            tuple(self.terms), tuple(origins), tuple(self.domains), frozenset(self.gates), tuple(self.relaxed)
        )

    def add_value(self, v: int, value: Value) -> None:
        alike = self.alike(value)
        if alike in self.products:
            self.add_product(value, self.products[alike])
            return
        ends = self.ends(value)
        product = len(ends.rows) * math.prod(map(len, ends.columns)) if len(ends.columns) < _MOST_AXES else math.inf
        sets = self.count_sets(ends) if len(ends.columns) > 2 else math.inf
        set_fits = sets <= _MOST_SETS and sets * len(ends.rows) <= self.largest
        pairs = max(map(len, ends.columns)) * max(len(ends.rows), *map(len, ends.columns))
        gated = self.style in ("gates", "shares") and 1 < len(ends.columns) <= MANY and pairs < product
        if self.style == "shares" and len(ends.columns) > MANY:
            self.add_relaxed(v, ends)
        elif gated:
            self.add_gates(v, ends)
        elif set_fits and (product > self.largest or (self.style == "sets" and sets < product / len(ends.rows))):
            self.add_set(v, ends)
        elif product <= self.largest:
            self.products[alike] = self.product(ends)
            self.add_product(value, self.products[alike])
        else:
            self.add_relaxed(v, ends)

    def alike(self, value: Value) -> tuple[object, ...]:
        """A key, equal for values of which the same is known: by the arrays themselves, which are kept alive."""
        ends = [(id(t), id(self.choices[c])) for c, t in zip(value.consumers, value.targets, strict=True)]
        prices = (id(value.seconds), id(value.bytes), self.charges(value))
        return (*prices, id(value.source), id(self.choices[value.producer]), *ends)

    def ends(self, value: Value) -> _KeptEnds:
        rows, source = np.unique(value.source[self.choices[value.producer]], return_inverse=True)
        columns, maps = [], [source]
        for c, targets in zip(value.consumers, value.targets, strict=True):
            column, classes = np.unique(self.as_paid(value, targets[self.choices[c]]), return_inverse=True)
            columns.append(column)
            maps.append(classes)
        return _KeptEnds(value, rows, tuple(columns), tuple(maps))

    def as_paid(self, value: Value, targets: Integers) -> Integers:
        """Target layouts that are free from everywhere need not be distinguished."""
        free = (scaled(self.sum, value.seconds) == 0).all(axis=0)
        if charge(self.sum, hull(value)):
            free &= value.bytes == 0
        return np.where(free, int(np.argmax(free)), np.arange(len(free)))[targets] if free.any() else targets

    def add_product(self, value: Value, known: CostTerm | None) -> None:
        """`known`: over the positions of the ends."""
        if known is not None:
            scope = (value.producer, *value.consumers)
            self.terms.append(known._replace(scope=tuple(scope[position] for position in known.scope)))

    def product(self, ends: _KeptEnds) -> CostTerm | None:
        """The term over (producer, all consumers), by their positions; None where it is zero."""
        key = self.key(ends, self.charges(ends.value))
        if key not in self.known:
            self.known[key] = self.store.base(_product(self.sum, ends))
        return self.term(range(len(ends.maps)), ends.maps, self.known[key])

    def add_set(self, v: int, ends: _KeptEnds) -> None:
        value, variable = ends.value, len(self.domains)
        key = self.key(ends, ())
        if key not in self.sets:
            self.sets[key] = self.set_tables(ends)
        count, pay, *missing = self.sets[key]
        self.domains.append(count)
        identity = np.arange(count)
        self.add_term((value.producer, variable), (ends.maps[0], identity), pay)
        for c, classes, table in zip(value.consumers, ends.maps[1:], missing, strict=True):
            self.add_term((variable, c), (identity, classes), table)
        self.add_split_bytes(v, ends)

    def set_tables(self, ends: _KeptEnds) -> list[int]:
        """The number of sets, the table of what making each costs, and of each consumer where its layout is missing."""
        everything = np.unique(np.concatenate(ends.columns))
        members = _members(len(everything), len(ends.columns))
        seconds = scaled(self.sum, ends.value.seconds)[np.ix_(ends.rows, everything)]
        pay = np.stack([np.where(members, row, 0.0).sum(axis=1) for row in seconds])
        lacks = [~members[:, np.searchsorted(everything, column)] for column in ends.columns]
        return [len(members), self.store.base(pay), *(self.store.base(np.where(lack, np.inf, 0.0)) for lack in lacks)]

    def add_gates(self, v: int, ends: _KeptEnds) -> None:
        """The last consumer always pays; one that takes over from a later one pays only for what it keeps longer."""
        value = ends.value
        spans = [charge(self.sum, span) for span in value.intervals]
        in_order = sorted(range(len(spans)), key=lambda i: -value.consumers[i])
        if len(spans) > 2 and not self.nested(value):
            self.relaxed.append(v)
        for place, i in enumerate(in_order):
            gate = len(self.domains)
            if place:
                self.domains.append(place + 1)
                self.gates.append(gate)
            pay = scaled(self.sum, value.seconds)[np.ix_(ends.rows, ends.columns[i])]
            pay = pay + spans[i] * value.bytes[ends.columns[i]]
            ends_ = (value.producer, value.consumers[i])
            self.add_term(ends_, (ends.maps[0], ends.maps[i + 1]), self.store.base(pay), ((gate, 0),) if place else ())
            for case, j in enumerate(in_order[:place], start=1):
                extra = self.extra_price(value, i, j) * value.bytes[ends.columns[i]]
                taken = np.where(ends.columns[j][:, None] == ends.columns[i], extra, np.inf)
                maps, pair = (ends.maps[j + 1], ends.maps[i + 1]), (value.consumers[j], value.consumers[i])
                self.add_term(pair, maps, self.store.base(taken), ((gate, case),))

    def extra_price(self, value: Value, i: int, j: int) -> float:
        """Price of a byte while consumer i keeps it longer than consumer j does."""
        both = span_of((value.intervals[i], value.intervals[j]))
        until = both if len(value.intervals) == 2 else value.intervals[i]
        return max(0.0, charge(self.sum, until) - charge(self.sum, value.intervals[j]))

    def nested(self, value: Value) -> bool:
        """True if of any two spans the more expensive costs as much as the hull of both."""
        pairs = combinations(value.intervals, 2)
        return all(charge(self.sum, span_of(p)) <= max(charge(self.sum, p[0]), charge(self.sum, p[1])) for p in pairs)

    def add_split_bytes(self, v: int, ends: _KeptEnds) -> None:
        """Split the price of bytes equally among keepers: exact for one keeper, a bound for more."""
        keepers = [i for i, span in enumerate(ends.value.intervals) if charge(self.sum, span)]
        if len(keepers) > 1:
            self.relaxed.append(v)
        for i in keepers:
            per_byte = charge(self.sum, ends.value.intervals[i]) / len(keepers)
            table = self.store.base(per_byte * ends.value.bytes[ends.columns[i]])
            self.add_term((ends.value.consumers[i],), (ends.maps[i + 1],), table)

    def add_relaxed(self, v: int, ends: _KeptEnds) -> None:
        value = ends.value
        seconds = scaled(self.sum, value.seconds)
        for i, c in enumerate(value.consumers):
            columns = ends.columns[i]
            pay = seconds[np.ix_(ends.rows, columns)] + charge(self.sum, value.intervals[i]) * value.bytes[columns]
            self.add_term(
                (value.producer, c), (ends.maps[0], ends.maps[i + 1]), self.store.base(pay / len(ends.columns))
            )
        self.relaxed.append(v)

    def key(self, ends: _KeptEnds, charges: object) -> tuple[object, ...]:
        """All that a product's table depends on."""
        value = ends.value
        arrays = (self.contents.number(value.seconds), self.contents.number(value.bytes))
        return (charges, *arrays, ends.rows.tobytes(), *(column.tobytes() for column in ends.columns))

    def charges(self, value: Value) -> object:
        """All that the bytes of a product depend on: what a byte costs over the hull of each group of consumers."""
        if not charge(self.sum, hull(value)):
            return ()
        if len(value.consumers) > 4:
            return value.intervals
        sizes = range(1, len(value.consumers) + 1)
        return tuple(charge(self.sum, span_of(group)) for n in sizes for group in combinations(value.intervals, n))

    def add_term(
        self, scope: Sequence[int], classes: Sequence[Integers], table: int, gates: tuple[tuple[int, int], ...] = ()
    ) -> None:
        term = self.term(scope, classes, table, gates)
        if term is not None:
            self.terms.append(term)

    def term(
        self, scope: Sequence[int], classes: Sequence[Integers], table: int, gates: tuple[tuple[int, int], ...] = ()
    ) -> CostTerm | None:
        """Rows of each axis that are equal are joined, axes of one row left out; None where all of it is zero."""
        if table not in self.merged:
            self.merged[table] = self.merge(self.store.table(table))
        number, rows = self.merged[table]
        if not self.store.table(number).any():
            return None
        axes = [i for i, row in enumerate(rows) if row.any()]
        maps = tuple(self.store.map_id(rows[i][classes[i]]) for i in axes)
        return CostTerm(tuple(scope[i] for i in axes), maps, number, gates)

    def merge(self, cost: Floats) -> tuple[int, list[Integers]]:
        """The table without repeated rows and without axes of one row; old row -> new row, of each axis."""
        rows = []
        for axis in range(cost.ndim):
            firsts, row = _distinct_rows(np.moveaxis(cost, axis, 0))
            cost = cost.take(firsts, axis=axis) if len(firsts) < cost.shape[axis] else cost
            rows.append(row)
        return self.store.base(cost.reshape([length for length in cost.shape if length > 1])), rows

    def count_sets(self, ends: _KeptEnds) -> float:
        targets = len(np.unique(np.concatenate(ends.columns)))
        return sum(math.comb(targets, size) for size in range(1, len(ends.columns) + 1))


def _members(count: int, most: int) -> Flags:
    """Every set of 1 to `most` of `count` targets, as flags: shape (sets, targets)."""
    picks = [pick for size in range(1, most + 1) for pick in combinations(range(count), size)]
    flags = np.zeros((len(picks), count), bool)
    for row, pick in enumerate(picks):
        flags[row, list(pick)] = True
    return flags


def _distinct_rows(cost: Floats) -> tuple[Integers, Integers]:
    """The first of each group of equal rows, and the group of each row."""
    if not cost.size:
        return np.arange(min(1, len(cost))), np.zeros(len(cost), np.int64)
    rows = np.ascontiguousarray(cost).reshape(len(cost), -1)
    texts = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).reshape(-1).tolist()
    number = {text: group for group, text in enumerate(dict.fromkeys(texts))}
    groups = np.fromiter(map(number.__getitem__, texts), np.int64, len(texts))
    firsts = np.empty(len(number), np.int64)
    firsts[groups[::-1]] = np.arange(len(texts))[::-1]  # the last written is the first
    return firsts, groups


def _product(sum_: Additive, ends: _KeptEnds) -> Floats:
    """sum over distinct targets of seconds and kept bytes, shape (rows, *columns): the first of a group pays for it."""
    value, arity = ends.value, len(ends.columns)
    seconds = scaled(sum_, value.seconds)[ends.rows]
    ids = [column.reshape(_along(i, len(column), arity)) for i, column in enumerate(ends.columns)]
    shape = tuple(map(len, ends.columns))
    total = np.zeros((len(ends.rows), *shape))
    for i, column in enumerate(ends.columns):
        first = np.ones((1,) * arity, bool)  # it grows by the dims that it depends on: only the last steps are whole
        for earlier in ids[:i]:
            first = first & (ids[i] != earlier)
        pay = seconds[:, column].reshape((len(ends.rows), *_along(i, len(column), arity)))
        total += np.where(first, pay, 0.0) if i else pay
        if charge(sum_, hull(value)):
            total += np.where(first, _hull_bytes(sum_, value, ids, i), 0.0)
    return total


def _hull_bytes(sum_: Additive, value: Value, ids: Sequence[Integers], i: int) -> Floats:
    """Cost of keeping consumer i's target over the hull of all that keep the same one, broadcast over the columns."""
    end = len(sum_.cumulative) - 1
    start, stop = np.full_like(ids[i], end), np.zeros_like(ids[i])
    for j, (low, high) in enumerate(value.intervals):
        if low < high:
            same = ids[j] == ids[i]
            start = np.minimum(start, np.where(same, low, end))
            stop = np.maximum(stop, np.where(same, high, 0))
    per_byte = np.where(start < stop, sum_.cumulative[stop] - sum_.cumulative[start], 0.0)
    return np.asarray(per_byte * value.bytes[ids[i]])


def _along(axis: int, length: int, arity: int) -> tuple[int, ...]:
    return tuple(length if a == axis else 1 for a in range(arity))
