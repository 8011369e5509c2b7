"""Memory limits as rows of the linear program, one a time step, made for the time steps that need one.

A target layout that several consumers keep is alive once: a column u >= w_i for each consumer i that keeps the value at
that time, where w_i[t] is the sum of the choices of consumer i that need layout t; and u >= w_i + w_j - 1 where i has
stopped and j has not begun (it is kept in between).

    sum_n bytes_n(s) x[n, s] + sum_v sum_t bytes_v(t) u_v[t] <= capacity     n, v alive at the time

Implemented in `memory_constraints.MemoryRows._add` (the row) and `memory_constraints.MemoryRows._alive` (u). With a
dual price p of a row, cost + p x row and the constant -p x capacity replace it: implemented in
`memory_constraints.with_prices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autoshard.ir.problem import Floats, Integers, Problem, Value
from autoshard.solvers.linear_program.rows import Linear, Rows

UNIT = 1e-4  # a row is in units of this part of the capacity: the solver's tolerance is then bytes, not megabytes
LARGEST = 1e7  # units: what takes more does not fit however much that is, and HiGHS refuses rows of huge numbers


class MemoryRows:
    """Makes the rows for one `Linear` and its columns; remembers the u columns that it has made."""

    def __init__(self, problem: Problem, model: Linear, columns: int) -> None:
        self.problem, self.model, self.columns = problem, model, columns
        self.unit = UNIT * problem.capacity_bytes or 1.0
        self.times: list[int] = []
        self._shared: dict[tuple[object, ...], dict[int, int]] = {}
        self._needs: dict[tuple[int, int], dict[int, Integers]] = {}
        self._rows: list[tuple[Integers, Floats, float, float]] = []

    def rows(self, times: Iterable[int]) -> Rows:
        """The rows of these times, with the columns that they need; `columns` goes on from there."""
        before = self.columns
        self._rows = []
        for time in times:
            self.times.append(time)
            self._add(time)
        counts = [len(indices) for indices, *_ in self._rows]
        lower = np.array([low for _, _, low, _ in self._rows])
        upper = np.array([high for _, _, _, high in self._rows])
        indices = np.concatenate([indices for indices, *_ in self._rows])
        entries = np.concatenate([entries for _, entries, *_ in self._rows])
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Rows(self.columns - before, starts, indices, entries, lower, upper)

    def _add(self, time: int) -> None:
        total: list[tuple[Integers, Floats]] = []
        for n, node in enumerate(self.problem.nodes):
            if node.interval[0] <= time < node.interval[1]:
                total.append((self._of(n), node.bytes[self.model.alive[n]]))
        for v, value in enumerate(self.problem.values):
            total.extend(self._value(v, value, time))
        indices = np.concatenate([i for i, _ in total]) if total else np.zeros(0, np.int64)
        sizes = np.concatenate([s for _, s in total]) / self.unit if total else np.zeros(0)
        sizes = np.minimum(sizes, LARGEST)
        used, where = np.unique(indices[sizes > 0].astype(np.int64), return_inverse=True)
        entries = np.asarray(np.bincount(where, weights=sizes[sizes > 0], minlength=len(used)), np.float64)
        self._rows.append((used, entries, -np.inf, self.problem.capacity_bytes / self.unit))

    def _of(self, n: int) -> Integers:
        return np.arange(self.model.first[n], self.model.first[n + 1])

    def _value(self, v: int, value: Value, time: int) -> Iterable[tuple[Integers, Floats]]:
        keepers = [i for i, (start, stop) in enumerate(value.intervals) if start < stop]
        active = tuple(i for i in keepers if value.intervals[i][0] <= time < value.intervals[i][1])
        early = tuple(i for i in keepers if value.intervals[i][1] <= time)
        late = tuple(i for i in keepers if value.intervals[i][0] > time)
        if not (early and late):
            early = late = ()
        if len(active) == 1 and not early:
            c = value.consumers[active[0]]
            yield self._of(c), value.bytes[value.targets[active[0]][self.model.alive[c]]]
        elif active or early:
            column_of = self._alive(v, value, active, early, late)
            yield np.array(list(column_of.values()), np.int64), value.bytes[list(column_of)]

    def _alive(
        self, v: int, value: Value, active: Sequence[int], early: Sequence[int], late: Sequence[int]
    ) -> dict[int, int]:
        """Target layout -> the column that is 1 where it is alive."""
        key = (v, active, early, late)
        if key not in self._shared:
            column_of = self._shared[key] = {}
            groups = [(i,) for i in active] + [(i, j) for i in early for j in late]
            for group in groups:
                needs = [self._need(v, value, i) for i in group]
                for target in sorted(set.intersection(*(set(need) for need in needs))):
                    if target not in column_of:
                        column_of[target] = self.columns
                        self.columns += 1
                    columns = np.concatenate([need[target] for need in needs])
                    entries = np.append(np.full(len(columns), -1.0), 1.0)
                    self._rows.append((np.append(columns, column_of[target]), entries, 1.0 - len(group), np.inf))
        return self._shared[key]

    def _need(self, v: int, value: Value, i: int) -> dict[int, Integers]:
        """Target layout -> the columns of the choices of consumer i that need it."""
        if (v, i) not in self._needs:
            c = value.consumers[i]
            targets, columns = value.targets[i][self.model.alive[c]], self._of(c)
            self._needs[v, i] = {int(t): columns[targets == t] for t in np.unique(targets)}
        return self._needs[v, i]


def with_prices(model: Linear, rows: Rows, prices: Floats) -> tuple[Linear, float]:
    """Memory rows taken into the costs at these prices a unit, one for each; and what the capacity is worth in all."""
    limits = np.isneginf(rows.lower)
    price = np.zeros(len(limits))
    price[limits] = prices
    loose = rows._replace(upper=np.where(limits, np.inf, rows.upper))
    wider = model.extended(loose)
    cost = wider.cost.copy()
    np.add.at(cost, rows.indices, np.repeat(price, np.diff(rows.starts)) * rows.entries)
    return replace(wider, cost=cost), float(price[limits] @ rows.upper[limits])


def expected(problem: Problem, model: Linear, x: Floats) -> Floats:
    """Bytes alive over time under a fractional x, shape (horizon,): what its memory rows would be at the least."""
    delta = np.zeros(problem.horizon + 1)
    shares = [x[a:b] for a, b in zip(model.first[:-1], model.first[1:], strict=True)]
    for node, some, share in zip(problem.nodes, model.alive, shares, strict=True):
        start, stop = node.interval
        if start < stop:
            size = float(node.bytes[some] @ share)
            delta[start] += size
            delta[stop] -= size
    for value in problem.values:
        keepers = [i for i, (start, stop) in enumerate(value.intervals) if start < stop]
        if not keepers:
            continue
        needs = {
            i: np.bincount(value.targets[i][model.alive[c]], weights=shares[c], minlength=len(value.bytes))
            for i in keepers
            for c in (value.consumers[i],)
        }
        ticks = sorted({t for i in keepers for t in value.intervals[i]})
        for start, stop in pairwise(ticks):
            alive = [needs[i] for i in keepers if value.intervals[i][0] <= start < value.intervals[i][1]]
            if alive:
                size = float(np.max(alive, axis=0) @ value.bytes)
                delta[start] += size
                delta[stop] -= size
    result: Floats = np.cumsum(delta)[:-1]
    return result
