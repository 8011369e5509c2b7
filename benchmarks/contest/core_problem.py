"""The core of a large problem: what is left after contraction, with its memory, and the way back to a plan.

After the first contraction it is known whose bytes never count: at no time of theirs do the largest choices together
overflow. Such nodes that have one neighbour or none are folded away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem, Value, memory
from autoshard.solvers.common.infeasibility import none_fits
from autoshard.units import EXACT, ROUNDING
from benchmarks.contest.presolve import Contracted, NodeWithoutChoice, PairGraph, contracted
from benchmarks.contest.reduced_problem import Inner, Items, packed


@dataclass(frozen=True, eq=False)
class Core(Inner):
    """`way`: from the choices of `graph` to those of `problem`: the one of `first`, and then that of `second`."""

    way: Contracted
    problem: Problem
    first: Contracted
    second: Contracted

    def fits(self, choice: Integers) -> bool:
        """What fits the problem fits here, and nothing else: a plan that is left out is taken for none."""
        capacity = self.items.capacity
        room = capacity - float(self.items.alive(choice).max(initial=0.0))
        if math.isinf(capacity) or abs(room) > EXACT * capacity:
            return room > 0
        return bool(memory(self.problem, self.lifted(choice)).max(initial=0.0) <= self.problem.capacity_bytes)

    def lifted(self, choice: Integers) -> tuple[int, ...]:
        return self.way.lifted(choice.tolist())

    def lowered(self, choice: Sequence[int]) -> Integers | None:
        """The choices of the core that stand for a plan of the problem, or for one that is no worse; None where
        contraction left them out."""
        first = self.first
        free = [np.ones(len(own), bool) for own in first.graph.unary]
        for of, owner, s in zip(first.maps, first.owner.tolist(), choice, strict=True):
            if owner >= 0:
                free[owner] &= of == s
            elif of[0] != s:
                return None
        if not all(some.any() for some in free):
            return None
        places = [np.flatnonzero(self.second.maps[n] == int(free[n].argmax())) for n in self.second.left.tolist()]
        return np.array([int(place[0]) for place in places], np.int64) if all(map(len, places)) else None


def core(problem: Problem) -> Core:
    """Of a problem whose values have one reader each, and no bytes. Raises InfeasibleError where a node has no allowed
    choice, or none that fits."""
    known: dict[tuple[object, ...], Floats] = {}
    pairs = [(value.producer, *value.consumers) for value in problem.values]
    try:
        costs = [_matrix(value, known) for value in problem.values]
        first = contracted([node.seconds for node in problem.nodes], pairs, costs)
    except NodeWithoutChoice as error:
        name = problem.nodes[error.node].name
        raise InfeasibleError(f"{name}: none of its choices is allowed together with the rest") from None
    try:
        second = _folded(first.graph, _items(problem, first))
    except NodeWithoutChoice:
        raise none_fits(problem, True) from None
    way = first.further(second)
    return Core(way.graph, _items(problem, way), way, problem, first, second)


def _matrix(value: Value, known: dict[tuple[object, ...], Floats]) -> Floats:
    """Seconds for every choice of the producer and of the reader; equal ones are one object."""
    (target,) = value.targets
    key = (id(value.seconds), value.source.tobytes(), target.tobytes())
    if key not in known:
        assert not value.bytes.any(), f"{value.name} has bytes of its own"
        known[key] = np.ascontiguousarray(value.seconds[value.source][:, target])
    return known[key]


def _folded(graph: PairGraph, items: Items) -> Contracted:
    """Without the nodes whose bytes never count that have one neighbour or none."""
    free = np.ones(len(items.ends), bool)
    free[items.node[_counting(items)]] = False
    return contracted(graph.unary, list(graph.edges), list(graph.edges.values()), free.tolist())


def _counting(items: Items) -> NDArray[np.bool_]:
    """Of all items: whether there is a time in its span at which the largest choices together overflow."""
    most = items.over_time(np.maximum.reduceat(items.bytes, items.first)) if len(items.node) else items.base
    before = np.append(0, np.cumsum(most > items.capacity * (1 - ROUNDING)))
    flags: NDArray[np.bool_] = before[items.high] > before[items.low]
    return flags


def _items(problem: Problem, way: Contracted) -> Items:
    spans, times = _condensed(np.array([node.interval for node in problem.nodes], np.int64).reshape(-1, 2))
    change = np.zeros(times + 1)
    found: list[tuple[int, int, int, Floats]] = []
    for (low, high), node, owner, of in zip(spans.tolist(), problem.nodes, way.owner.tolist(), way.maps, strict=True):
        if low >= high:
            continue
        size = node.bytes[of]
        least = float(size.min())
        if least:
            change[low] += least
            change[high] -= least
        if owner >= 0 and float(size.max()) > least:
            found.append((owner, low, high, size - least))
    ends = np.cumsum([len(own) for own in way.graph.unary]).astype(np.int64)
    return packed(_joined(found), np.cumsum(change)[:-1], problem.capacity_bytes, ends)


def _joined(found: list[tuple[int, int, int, Floats]]) -> list[tuple[int, int, int, Floats]]:
    """Items of one node over one span are one."""
    joined: dict[tuple[int, int, int], Floats] = {}
    for node, low, high, size in found:
        key = (node, low, high)
        joined[key] = joined[key] + size if key in joined else size
    return [(*key, size) for key, size in sorted(joined.items(), key=lambda pair: pair[0])]


def _condensed(spans: Integers) -> tuple[Integers, int]:
    """The spans over the times where a peak can be (just before a stop that follows a start), and their number."""
    real = spans[spans[:, 0] < spans[:, 1]]
    starts, stops = np.unique(real[:, 0]), np.unique(real[:, 1])
    before = np.searchsorted(starts, stops)
    times = stops[np.diff(before, prepend=0) > 0] - 1
    moved = np.searchsorted(times, spans)
    return np.where(spans[:, :1] < spans[:, 1:], moved, 0), len(times)
