"""Min-plus elimination: run the steps of a plan, then walk back to read off the best strategies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import SLAB, Floats, Integers
from autoshard.solvers.common import clock
from autoshard.solvers.common.effort import WIDE
from autoshard.solvers.elimination.cost_tables import Cases, CostTerm, Store, TableRecipe
from autoshard.solvers.elimination.elimination_order import Elimination


def run(store: Store, plan: Elimination) -> float:
    """Computes every table of the plan; returns the minimum (a lower bound of it where the plan is not exact)."""
    clock.check(plan.work)
    for number in plan.tables:
        clock.check()
        store.tables[number] = compute(store, store.recipes[number])
    return math.fsum(float(store.table(number)) for number in plan.constants)


def backtrack(store: Store, plan: Elimination, fixed: Mapping[int, int] | None = None) -> list[int]:
    """The best strategy of each variable, given those eliminated after it and those that stayed; ties by the lowest."""
    choice = [0] * len(plan.domains)
    for variable, strategy in (fixed or {}).items():
        choice[variable] = strategy
    for step in reversed(plan.steps):
        costs = np.zeros(plan.domains[step.variable])
        for term in step.terms:
            if all(choice[gate] == value for gate, value in term.gates if gate != step.variable):
                _add(store, term, step.variable, choice, costs)
        choice[step.variable] = int(np.argmin(costs))
    return choice


def _add(store: Store, term: CostTerm, variable: int, choice: Sequence[int], costs: Floats) -> None:
    """Adds a term to the cost of each strategy of one of its variables, the others being chosen."""
    index: list[int | slice] = []
    for other, map_ in zip(term.scope, term.maps, strict=True):
        index.append(slice(None) if other == variable else int(store.maps[map_][choice[other]]))
    part = store.table(term.table)[tuple(index)]
    if variable in term.scope:
        costs += part[store.maps[term.maps[term.scope.index(variable)]]]
    else:
        costs[dict(term.gates)[variable]] += part


def compute(store: Store, recipe: TableRecipe | Cases) -> Floats:
    """The table of a recipe, shape: the numbers of classes of `recipe.out`."""
    return _least_case(store, recipe) if isinstance(recipe, Cases) else _least_strategy(store, recipe)


def _least_case(store: Store, recipe: Cases) -> Floats:
    result = np.full([store.counts[map_] for map_ in recipe.out], np.inf)
    for terms in recipe.values:
        parts = [_part(store, table, axes, recipe.out) for table, axes in terms]
        np.minimum(result, sum((part.array() for part in parts), start=np.zeros(())), out=result)
    return result


def _least_strategy(store: Store, recipe: TableRecipe) -> Floats:
    costs = np.zeros(recipe.domain)
    for table, map_ in recipe.unary:
        costs += store.table(table)[store.maps[map_]]
    if not recipe.joint:
        return np.asarray(costs.min())
    eliminated = store.join(map_ for _, axes in recipe.joint for slot, map_ in axes if slot < 0)
    least = np.full(store.counts[eliminated], np.inf)
    np.minimum.at(least, store.maps[eliminated], costs)  # strategies that no term tells apart are one
    classes = (eliminated, *recipe.out)
    parts = [TableView(least.reshape((-1,) + (1,) * len(recipe.out)), (slice(None),) + (None,) * len(recipe.out))]
    for table, axes in recipe.joint:
        parts.append(_part(store, table, tuple((slot + 1, map_) for slot, map_ in axes), classes))
    return min_plus(parts, [store.counts[map_] for map_ in classes])


def table_of(store: Store, terms: Sequence[CostTerm], scope: Sequence[int], classes: Sequence[int]) -> Floats:
    """The sum of terms over `scope`, axis i having the classes of map `classes[i]`."""
    slots = {variable: slot for slot, variable in enumerate(scope)}
    result = np.zeros([store.counts[map_] for map_ in classes])
    for term in terms:
        axes = tuple((slots[variable], map_) for variable, map_ in zip(term.scope, term.maps, strict=True))
        result += _part(store, term.table, axes, classes).array()
    return result


class TableView(NamedTuple):
    """A table seen at finer classes, without being copied: `rows[axis]` says which of its rows stand along an axis.

    None: the table does not depend on that axis, and has length 1 there.
    """

    table: Floats
    rows: tuple[slice | Integers | None, ...]

    def cut(self, axis: int, window: slice) -> TableView:
        old = self.rows[axis]
        if old is None:
            return self
        new = window if isinstance(old, slice) else old[window]
        table = self.table
        if isinstance(old, slice):
            table, new = table[(slice(None),) * axis + (window,)], slice(None)
        return TableView(table, (*self.rows[:axis], new, *self.rows[axis + 1 :]))

    def array(self) -> Floats:
        table = self.table
        for axis in range(len(self.rows) - 1, -1, -1):  # the last axis is slow to pick from: while the table is small
            rows = self.rows[axis]
            if isinstance(rows, np.ndarray):
                table = table.take(rows, axis=axis)
        return table


def _part(store: Store, number: int, axes: Sequence[tuple[int, int]], classes: Sequence[int]) -> TableView:
    """A table with an axis (slot, map) of its separate order, seen over the axes `classes` (maps at least as fine)."""
    table = store.table(number)
    order = sorted(range(len(axes)), key=lambda position: axes[position][0])
    shape = [1] * len(classes)
    rows: list[slice | Integers | None] = [None] * len(classes)
    for slot, map_ in axes:
        shape[slot] = store.counts[map_]
        rows[slot] = slice(None) if map_ == classes[slot] else store.project(classes[slot], map_)
    return TableView(np.ascontiguousarray(table.transpose(order)).reshape(shape), tuple(rows))


def min_plus(parts: Sequence[TableView], shape: Sequence[int]) -> Floats:
    """min over axis 0 of the sum of parts over `shape`."""
    result = np.empty(shape[1:])
    if math.prod(shape) <= SLAB:
        _slabs(parts, shape[0], result)
        return result
    other = np.empty(shape[1:]) if shape[0] > WIDE else result
    for low in range(0, shape[0], WIDE):
        window = slice(low, min(low + WIDE, shape[0]))
        _slabs([part.cut(0, window) for part in parts], window.stop - low, other if low else result)
        if low:
            np.minimum(result, other, out=result)
    return result


def _slabs(parts: Sequence[TableView], depth: int, result: Floats) -> None:
    """Fills `result` piece by piece, the joint table of a piece staying in the cache."""
    most = max(1, SLAB // depth)
    if result.size > most:
        axis = next(a for a, length in enumerate(result.shape) if length > 1)
        rows = max(1, most * result.shape[axis] // result.size)
        for low in range(0, result.shape[axis], rows):
            clock.check()
            window = slice(low, low + rows)
            piece = result[(slice(None),) * axis + (window,)]
            _slabs([part.cut(axis + 1, window) for part in parts], depth, piece)
        return
    total, *others = sorted((part.array() for part in parts), key=lambda array: array.size)
    for array in others:
        total = total + array
    result[...] = total.min(axis=0)
