"""Min-plus elimination: run the steps of a plan, then walk back to read off the best strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard.problem import Floats
from autoshard.solvers.order import Elimination
from autoshard.solvers.tables import Cases, Recipe, Store, Term

_SMALL = 1 << 17  # entries: below it one broadcast sum is cheaper than a loop
_SLAB = 1 << 15  # entries of a slab of the result, so that the loop stays in the cache


def run(store: Store, plan: Elimination) -> float:
    """Computes every table of the plan; returns the minimum (a lower bound of it where the plan is not exact)."""
    for number in plan.tables:
        store.tables[number] = compute(store, store.recipes[number])
    return math.fsum(float(store.table(number)) for number in plan.constants)


def backtrack(store: Store, plan: Elimination) -> list[int]:
    """The best strategy of each variable, given those eliminated after it; ties by the lowest."""
    choice = [0] * len(plan.domains)
    for step in reversed(plan.steps):
        costs = np.zeros(plan.domains[step.variable])
        for term in step.terms:
            if all(choice[gate] == value for gate, value in term.gates if gate != step.variable):
                _add(store, term, step.variable, choice, costs)
        choice[step.variable] = int(np.argmin(costs))
    return choice


def _add(store: Store, term: Term, variable: int, choice: Sequence[int], costs: Floats) -> None:
    """Adds a term to the cost of each strategy of one of its variables, the others being chosen."""
    index: list[int | slice] = []
    for other, map_ in zip(term.scope, term.maps, strict=True):
        index.append(slice(None) if other == variable else int(store.maps[map_][choice[other]]))
    part = store.table(term.table)[tuple(index)]
    if variable in term.scope:
        costs += part[store.maps[term.maps[term.scope.index(variable)]]]
    else:
        costs[dict(term.gates)[variable]] += part


def compute(store: Store, recipe: Recipe | Cases) -> Floats:
    """The table of a recipe, shape: the numbers of classes of `recipe.out`."""
    return _least_case(store, recipe) if isinstance(recipe, Cases) else _least_strategy(store, recipe)


def _least_case(store: Store, recipe: Cases) -> Floats:
    shape = tuple(store.counts[map_] for map_ in recipe.out)
    result = np.full(shape, np.inf)
    for parts in recipe.values:
        total = np.zeros((1,) * len(shape))
        for table, axes in parts:
            total = total + _aligned(store, store.table(table), axes, -1, recipe.out)[0]
        np.minimum(result, total, out=result)
    return result


def _least_strategy(store: Store, recipe: Recipe) -> Floats:
    own = np.zeros(recipe.domain)
    for table, map_ in recipe.unary:
        own += store.table(table)[store.maps[map_]]
    if not recipe.joint:
        return np.asarray(own.min())
    eliminated = store.join(map_ for _, axes in recipe.joint for slot, map_ in axes if slot < 0)
    least = np.full(store.counts[eliminated], np.inf)
    np.minimum.at(least, store.maps[eliminated], own)  # strategies that no term tells apart are one
    parts = [least.reshape((-1,) + (1,) * len(recipe.out))]
    for table, axes in recipe.joint:
        parts.append(_aligned(store, store.table(table), axes, eliminated, recipe.out))
    return min_plus(parts)


def _aligned(
    store: Store, table: Floats, axes: tuple[tuple[int, int], ...], eliminated: int, out: tuple[int, ...]
) -> Floats:
    """The table over (eliminated, *out), refined to their classes; length 1 where it does not depend on an axis."""
    shape = [1] * (len(out) + 1)
    for position, (slot, map_) in enumerate(axes):
        fine = eliminated if slot < 0 else out[slot]
        if fine != map_:
            table = table.take(store.project(fine, map_), axis=position)
        shape[slot + 1] = store.counts[fine]
    order = sorted(range(len(axes)), key=lambda position: axes[position][0])
    return np.ascontiguousarray(table.transpose(order)).reshape(shape)


def min_plus(parts: Sequence[Floats]) -> Floats:
    """min over axis 0 of the sum of arrays that broadcast to one shape."""
    parts = _merged(parts)
    shape = np.broadcast_shapes(*(part.shape for part in parts))
    if len(parts) == 1:
        return np.asarray(parts[0].min(axis=0))
    if math.prod(shape) <= _SMALL:
        return np.asarray(_sum(parts).min(axis=0))
    result = np.empty(shape[1:])
    _slabs(parts, result)
    return result


def _merged(parts: Sequence[Floats]) -> list[Floats]:
    """Parts added into another that is at least as large in every axis, smallest first."""
    left = sorted(parts, key=lambda part: part.size)
    kept: list[Floats] = []
    while left:
        part = left.pop(0)
        for i, other in enumerate(left):
            if all(a <= b for a, b in zip(part.shape, other.shape, strict=True)):
                left[i] = other + part
                break
        else:
            kept.append(part)
    return kept


def _slabs(parts: Sequence[Floats], result: Floats) -> None:
    """Fills `result` piece by piece; the longest axis that is still too much is halved."""
    if result.size > _SLAB:
        axis = next(a for a, length in enumerate(result.shape) if length > 1)
        rows = max(1, _SLAB * result.shape[axis] // result.size)
        for low in range(0, result.shape[axis], rows):
            window = slice(low, low + rows)
            cut = [_slice(part, axis + 1, window) if part.shape[axis + 1] > 1 else part for part in parts]
            _slabs(cut, _slice(result, axis, window))
        return
    total = np.empty(result.shape)
    result.fill(np.inf)
    for x in range(parts[0].shape[0]):
        head = _sum([part[x] for part in parts[:-1]])
        np.add(head, parts[-1][x], out=total)
        np.minimum(result, total, out=result)


def _slice(array: Floats, axis: int, window: slice) -> Floats:
    return array[(slice(None),) * axis + (window,)]


def _sum(parts: Sequence[Floats]) -> Floats:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
