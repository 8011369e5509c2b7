"""The problem as a linear program over choices: the tight formulation, in arrays.

Columns: x[n, s], node n takes choice s (the integer ones, first); and for every value, at the level of layouts,

- z_i[r, t]: the producer leaves layout r and consumer i needs layout t. Sums over t are the producer's x, sums over r
  the consumer's: on a tree of values the relaxation has integral vertices.
- m[r, t], only where several consumers can need t: made once, paid once. m >= z_i for each of them. In the relaxation
  m = max_i z_i, the least that is possible for two consumers, and a bound for more.

    minimise    sum a_n(s) x[n, s] + sum over values of b(r, t) z_i[r, t], or b(r, t) m[r, t] where t is shared
    subject to  sum_s x[n, s] = 1                                          for each node n
                sum_t z_i[r, t] = sum of x[producer, s] with s in r        for each consumer i, layout r
                sum_r z_i[r, t] = sum of x[consumer i, s] with s in t      for each consumer i, layout t
                m[r, t] >= z_i[r, t],  0 <= x, z, m <= 1                   for each consumer i, pair r, t
                bytes of what is alive at a time <= capacity               where a solution violates it

The rows of nodes are implemented in `rows.linear`, those of values in `rows._edges`, those of memory in
`memory_constraints.MemoryRows`. A cost b(r, t) = b1(r) + b2(t) goes to x (implemented in `rows._additive`). Only x need
be integer: then z and m are. Layouts that cost the same everywhere are one, a cost that is a sum of one for each end
needs no z, and a forbidden pair has no column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers, Problem, Value
from autoshard.solvers.common import clock

SCALED_TOTAL = 1e5  # what the objective is scaled to, about: tolerances of solvers are absolute


class Rows(NamedTuple):
    """Rows of `lower <= A x <= upper` in compressed form, on `columns` new columns of cost 0 from 0 to 1."""

    columns: int
    starts: Integers  # shape (rows + 1,)
    indices: Integers
    entries: Floats
    lower: Floats
    upper: Floats


class Flow(NamedTuple):
    """The z columns between a producer and one consumer: `columns[r, t]`, -1 where the pair is forbidden.

    `source[i]`, `target[i]`: the classes r and t of the i-th kept choice of the two nodes.
    """

    producer: int
    consumer: int
    source: Integers
    target: Integers
    columns: Integers


@dataclass(frozen=True, eq=False)
class Linear:
    """Minimise `cost` . x over 0 <= x <= 1, `rows`; columns first[n] <= j < first[n + 1] are the choices `alive[n]`."""

    alive: tuple[Integers, ...]
    first: Integers
    cost: Floats
    rows: Rows
    flows: tuple[Flow, ...]

    @property
    def choices(self) -> int:
        """Columns that must be integer: 0 to here."""
        return int(self.first[-1])

    def picked(self, x: Floats) -> tuple[int, ...]:
        """The choice of every node that has the largest column."""
        return tuple(
            int(some[np.argmax(x[a:b])]) for some, a, b in zip(self.alive, self.first[:-1], self.first[1:], strict=True)
        )

    def columns_of(self, choice: Sequence[int]) -> Integers:
        """The column of each node's choice, which must be among those kept."""
        where = [int(np.searchsorted(some, s)) for some, s in zip(self.alive, choice, strict=True)]
        return self.first[:-1] + np.array(where, np.int64)

    def extended(self, more: Rows) -> Linear:
        old = self.rows
        rows = Rows(
            0,
            np.concatenate([old.starts, old.starts[-1] + more.starts[1:]]),
            np.concatenate([old.indices, more.indices]),
            np.concatenate([old.entries, more.entries]),
            np.concatenate([old.lower, more.lower]),
            np.concatenate([old.upper, more.upper]),
        )
        return replace(self, cost=np.append(self.cost, np.zeros(more.columns)), rows=rows)


def pairs(problem: Problem, choices: Sequence[Integers] | None = None) -> int:
    """Edge variables of the same formulation written at the level of choices: how such a problem's size is quoted."""
    sizes = [len(node.seconds) for node in problem.nodes] if choices is None else [len(some) for some in choices]
    return sum(sizes[v.producer] * sizes[c] for v in problem.values for c in v.consumers)


def linear(problem: Problem, choices: Sequence[Integers]) -> Linear:
    """Linear program without memory (see `memory_constraints.py`). `choices` a node: ascending, arc-consistent."""
    first = np.concatenate([[0], np.cumsum([len(some) for some in choices])]).astype(np.int64)
    cost = [np.concatenate([node.seconds[some] for node, some in zip(problem.nodes, choices, strict=True)])]
    blocks = _EqualBlocks(choices)
    choice_ids = np.arange(first[-1])
    counts, indices, entries = [np.diff(first)], [choice_ids], [np.ones(len(choice_ids))]
    lower, upper = [np.ones(len(choices))], [np.ones(len(choices))]
    columns = int(first[-1])
    flows: list[Flow] = []
    for value in problem.values:
        clock.check()
        block = blocks.of(value)
        ends = np.concatenate([np.arange(first[n], first[n + 1]) for n in (value.producer, *value.consumers)])
        cost[0][ends] += block.end_costs
        if len(block.cost):
            place = np.append(ends, np.arange(columns, columns + len(block.cost)))
            counts.append(block.counts)
            indices.append(place[block.indices])
            entries.append(block.entries)
            lower.append(np.zeros(len(block.counts)))
            upper.append(block.upper)
            cost.append(block.cost)
            for c, (source, target, local) in zip(value.consumers, block.flows, strict=True):
                flows.append(Flow(value.producer, c, source, target, np.append(place, -1)[local]))
            columns += len(block.cost)
    starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    rows = Rows(0, starts, *map(np.concatenate, (indices, entries, lower, upper)))
    return Linear(tuple(choices), first, np.concatenate(cost), rows, tuple(flows))


class _Block(NamedTuple):
    """Contribution of a value: `end_costs` of its ends' columns, new columns of cost `cost`, and rows.

    Local columns: the choices of the producer, of each consumer, then the new ones. 0 <= row <= `upper`.
    """

    end_costs: Floats
    cost: Floats
    counts: Integers
    indices: Integers
    entries: Floats
    upper: Floats
    flows: tuple[tuple[Integers, Integers, Integers], ...]  # of each consumer: source, target, columns, as in Flow


class _EndClasses(NamedTuple):
    """`seconds[r, t]` over source and target classes that differ; `source[s]`, `targets[i][s]`: a choice's class."""

    seconds: Floats
    source: Integers
    targets: tuple[Integers, ...]


class _EqualBlocks:
    """Blocks by content: the values of repeated layers are written once."""

    def __init__(self, choices: Sequence[Integers]) -> None:
        self.keys = [some.tobytes() for some in choices]
        self.choices = choices
        self.known: dict[tuple[object, ...], _Block] = {}

    def of(self, value: Value) -> _Block:
        nodes = (value.producer, *value.consumers)
        layouts = (value.source, *value.targets)
        key = (id(value.seconds), *((id(x), self.keys[n]) for x, n in zip(layouts, nodes, strict=True)))
        if key not in self.known:
            self.known[key] = _block(_ends(value, [self.choices[n] for n in nodes]))
        return self.known[key]


def _ends(value: Value, choices: Sequence[Integers]) -> _EndClasses:
    rows, source = np.unique(value.source[choices[0]], return_inverse=True)
    used = [targets[some] for targets, some in zip(value.targets, choices[1:], strict=True)]
    columns, together = np.unique(np.concatenate(used), return_inverse=True)
    seconds = value.seconds[np.ix_(rows, columns)]
    if len(used) == 1:
        same = _equal_rows(seconds.T)
    else:  # different layouts are paid for each, unless they are free
        free = (seconds == 0).all(axis=0)
        same = np.where(free, int(np.argmax(free)), np.arange(len(free)))
    which, classes = np.unique(same, return_inverse=True)
    seconds, together = seconds[:, which], classes[together]
    heads, merged = np.unique(_equal_rows(seconds), return_inverse=True)
    split = np.split(together, np.cumsum([len(u) for u in used])[:-1])
    return _EndClasses(seconds[heads], merged[source], tuple(split))


def _equal_rows(table: Floats) -> Integers:
    """Index of the first equal row, for each row."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), i) for i, row in enumerate(np.ascontiguousarray(table))])


def _block(ends: _EndClasses) -> _Block:
    parts = _additive(ends)
    return parts if parts is not None else _edges(ends)


def _additive(ends: _EndClasses) -> _Block | None:
    """Block of one consumer, if its cost is a sum of one for each end; None if it is not."""
    table = ends.seconds
    if len(ends.targets) > 1 or not np.isfinite(table).all():
        return None
    rows, columns = table[:, 0], table[0] - table[0, 0]
    if not np.allclose(rows[:, None] + columns, table, rtol=1e-14, atol=0.0):
        return None
    none, empty = np.zeros(0), np.zeros(0, np.int64)
    return _Block(np.append(rows[ends.source], columns[ends.targets[0]]), none, empty, empty, none, none, ())


def _edges(ends: _EndClasses) -> _Block:
    counts: list[Integers] = []
    indices: list[Integers] = []
    entries: list[Floats] = []
    upper: list[Floats] = []
    possible = np.isfinite(ends.seconds)
    users = np.stack([np.bincount(t, minlength=len(possible[0])) > 0 for t in ends.targets])
    shared = users.sum(axis=0) > 1
    widths = [len(ends.source), *(len(t) for t in ends.targets)]
    place, next_ = np.cumsum([0, *widths]), int(sum(widths))
    costs: list[Floats] = []
    flows: list[tuple[Integers, Integers, Integers]] = []
    pay_columns = np.full(ends.seconds.shape, -1)

    def add(rows: Integers, columns: Integers, values: Floats, count: int, most: float) -> None:
        order = np.argsort(rows, kind="stable")
        counts.append(np.bincount(rows, minlength=count))
        indices.append(columns[order])
        entries.append(values[order])
        upper.append(np.full(count, most))

    for i, targets in enumerate(ends.targets):
        r, t = np.nonzero(possible & users[i])
        z = np.arange(next_, next_ + len(r))
        next_ += len(r)
        costs.append(np.where(shared[t], 0.0, ends.seconds[r, t]))
        columns = np.full(ends.seconds.shape, -1)
        columns[r, t] = z
        flows.append((ends.source, targets, columns))
        for layouts, here, at in ((r, ends.source, place[0]), (t, targets, place[i + 1])):
            _, row = np.unique(np.append(layouts, here), return_inverse=True)
            sign = np.append(np.ones(len(z)), np.full(len(here), -1.0))
            add(row, np.append(z, at + np.arange(len(here))), sign, int(row.max()) + 1, 0.0)
        paid = np.flatnonzero(shared[t] & (ends.seconds[r, t] > 0))
        new = paid[pay_columns[r[paid], t[paid]] < 0]
        pay_columns[r[new], t[new]] = np.arange(next_, next_ + len(new))
        costs.append(ends.seconds[r[new], t[new]])
        next_ += len(new)
        row = np.arange(len(paid))
        sign = np.append(np.ones(len(paid)), np.full(len(paid), -1.0))
        if len(paid):
            add(np.append(row, row), np.append(pay_columns[r[paid], t[paid]], z[paid]), sign, len(paid), np.inf)
    end_costs = np.zeros(place[-1])
    return _Block(
        end_costs,
        np.concatenate(costs),
        np.concatenate(counts),
        np.concatenate(indices),
        np.concatenate(entries),
        np.concatenate(upper),
        tuple(flows),
    )
