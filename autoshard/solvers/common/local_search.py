"""Local search on the true objective under the true memory: one node at a time, all its strategies at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from autoshard.ir.problem import Floats, Integers, Problem, Value, memory, objective
from autoshard.solvers.common import clock
from autoshard.solvers.common.effort import MOST_ROUNDS

Choice = tuple[int, ...]
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Links:
    """Links of each node: the values it produces, and those it consumes with its position among their consumers."""

    produced: tuple[tuple[Value, ...], ...]
    consumed: tuple[tuple[tuple[Value, int], ...], ...]

    def around(self, n: int) -> list[int]:
        """The nodes that share a value with node n, itself among them."""
        values = (*self.produced[n], *(value for value, _ in self.consumed[n]))
        return list({node for value in values for node in (value.producer, *value.consumers)})


@dataclass(frozen=True)
class Aim:
    """Objective to minimise: weight x seconds + penalty x (peak - capacity where positive)."""

    weight: float
    penalty: float
    capacity: float


def links(problem: Problem) -> Links:
    produced: list[list[Value]] = [[] for _ in problem.nodes]
    consumed: list[list[tuple[Value, int]]] = [[] for _ in problem.nodes]
    for value in problem.values:
        produced[value.producer].append(value)
        for position, c in enumerate(value.consumers):
            consumed[c].append((value, position))
    return Links(tuple(map(tuple, produced)), tuple(map(tuple, consumed)))


def descend(problem: Problem, linked: Links, choice: Sequence[int], aim: Aim) -> Choice:
    """Coordinate descent from `choice` until a sweep changes nothing, or time is over; ties stay where they are.

    Without a capacity a node depends on those it shares a value with: it is considered again once one of them moves.
    """
    current = [int(s) for s in choice]
    bounded = aim.penalty > 0 and not math.isinf(aim.capacity)
    alive = memory(problem, current) if bounded else np.zeros(0)
    settled = np.zeros(len(current), bool)
    for _ in range(MOST_ROUNDS):
        moved = False
        for n, node in enumerate(problem.nodes):
            if len(node.seconds) < 2 or settled[n]:
                continue
            if clock.over():
                return tuple(current)
            seconds = options(problem, linked, current, n)
            scores = aim.weight * seconds if aim.weight else np.where(np.isinf(seconds), np.inf, 0.0)
            if bounded:
                prints = footprints(problem, linked, current, n)
                peaks = (alive - prints[current[n]] + prints).max(axis=1, initial=0.0)
                scores = scores + aim.penalty * np.maximum(peaks - aim.capacity, 0.0)
            best = int(np.argmin(scores))
            if _clearly_less(float(scores[best]), float(scores[current[n]])):
                if bounded:
                    alive = alive - prints[current[n]] + prints[best]
                current[n], moved = best, True
                settled[linked.around(n)] = False
            settled[n] = not bounded
        if not moved:
            break
    return tuple(current)


def polished(problem: Problem, choice: Choice) -> Choice:
    """Descent on the objective, with forbidden entries as very expensive ones while `choice` uses some."""
    if math.isinf(objective(problem, choice)):
        softer = softened(problem)
        choice = descend(softer, links(softer), choice, Aim(1.0, 0.0, math.inf))
    return descend(problem, links(problem), choice, Aim(1.0, 0.0, math.inf))


def softened(problem: Problem) -> Problem:
    """Forbidden entries made finite, each more expensive than everything else together."""
    tables = [node.seconds for node in problem.nodes] + [value.seconds for value in problem.values]
    penalty = 1.0 + 2.0 * sum(float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) * max(t.shape) for t in tables)

    def soft(table: Floats) -> Floats:
        return np.where(np.isinf(table), penalty, table)

    return replace(
        problem,
        nodes=tuple(replace(node, seconds=soft(node.seconds)) for node in problem.nodes),
        values=tuple(replace(value, seconds=soft(value.seconds)) for value in problem.values),
    )


def _clearly_less(a: float, b: float) -> bool:
    return a < b and (math.isinf(b) or b - a > 1e-12 * abs(b))


def options(problem: Problem, linked: Links, choice: Sequence[int], n: int) -> Floats:
    """Seconds that depend on node n, for each of its strategies while all others stay, shape (strategies,)."""
    total = to_readers(problem, linked, choice, n)
    for value, position in linked.consumed[n]:
        pay = value.seconds[value.source[choice[value.producer]]]
        if len(value.consumers) > 1:
            pay = pay.copy()
            shared = [int(t[choice[c]]) for c, t in _others(value, position)]
            pay[[t for t in shared if math.isfinite(pay[t])]] = 0.0
        total += pay[value.targets[position]]
    return total


def to_readers(problem: Problem, linked: Links, choice: Sequence[int], n: int) -> Floats:
    """Costs of the choices of a node, without those of the values that it reads."""
    total = problem.nodes[n].seconds.copy()
    for value in linked.produced[n]:
        needed = sorted({int(t[choice[c]]) for c, t in zip(value.consumers, value.targets, strict=True)})
        total += value.seconds[:, needed].sum(axis=1)[value.source]
    return total


def footprints(problem: Problem, linked: Links, choice: Sequence[int], n: int) -> Floats:
    """Bytes over time that depend on node n, for each of its strategies, shape (strategies, horizon)."""
    node = problem.nodes[n]
    total = np.zeros((len(node.seconds), problem.horizon))
    start, stop = node.interval
    if start < stop:
        total[:, start:stop] += node.bytes[:, None]
    for value, position in linked.consumed[n]:
        if value.intervals[position][0] < value.intervals[position][1]:
            targets, row = np.unique(value.targets[position], return_inverse=True)
            total += np.stack([_grown(problem, value, choice, position, int(t)) for t in targets])[row]
    return total


def _grown(problem: Problem, value: Value, choice: Sequence[int], position: int, target: int) -> Floats:
    """Bytes over time that keeping `target` for one more consumer adds to what the others keep."""
    low, high = value.intervals[position]
    result = np.zeros(problem.horizon)
    spans = [
        span
        for (c, t), span in zip(_others(value, position), _without(value.intervals, position), strict=True)
        if span[0] < span[1] and int(t[choice[c]]) == target
    ]
    if spans:
        first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
        result[min(low, first) : max(high, last)] = value.bytes[target]
        result[first:last] = 0.0
    else:
        result[low:high] = value.bytes[target]
    return result


def _others(value: Value, position: int) -> list[tuple[int, Integers]]:
    return _without(list(zip(value.consumers, value.targets, strict=True)), position)


def _without(items: Sequence[_T], position: int) -> list[_T]:
    return [item for i, item in enumerate(items) if i != position]


def line(problem: Problem) -> list[int]:
    """The nodes in an order in which those that share a value stand close: a stored tensor just before its first
    consumer, a sink behind its producer."""
    place = np.arange(len(problem.nodes), dtype=float)
    first = np.full(len(place), np.inf)
    reads = np.full(len(place), -np.inf)
    for value in problem.values:
        first[value.producer] = min(first[value.producer], *value.consumers)
        for c in value.consumers:
            reads[c] = max(reads[c], value.producer)
    stored = np.isinf(reads) & np.isfinite(first)
    sink = np.isfinite(reads) & np.isinf(first)
    place = np.where(stored, first - 0.5, np.where(sink, reads + 0.5, place))
    return [int(n) for n in np.argsort(place, kind="stable")]


def mixtures(problem: Problem, first: Choice, second: Choice, most: int) -> list[tuple[float, Choice]]:
    """Choices that follow `first` up to a place in the line and `second` after it, and the other way round, each after
    its seconds; the places are spread evenly."""
    count, places = len(problem.nodes), np.empty(len(problem.nodes), np.int64)
    places[line(problem)] = np.arange(count)
    cuts = sorted({round(count * i / most) for i in range(1, most)} - {0, count})
    ends = [(np.array(a), np.array(b)) for a, b in ((first, second), (second, first))]
    choices = {tuple(np.where(places < cut, a, b).tolist()): None for a, b in ends for cut in cuts}
    seconds = objectives(problem, np.array(list(choices), np.int64).reshape(len(choices), count)).tolist()
    return [(value, choice) for value, choice in zip(seconds, choices, strict=True) if math.isfinite(value)]


def objectives(problem: Problem, choices: Integers) -> Floats:
    """Objectives of all rows of `choices` together, each as `objective` up to rounding."""
    total = np.zeros(len(choices))
    for n, node in enumerate(problem.nodes):
        total += node.seconds[choices[:, n]]
    for value in problem.values:
        source = value.source[choices[:, value.producer]]
        needed = np.array([t[choices[:, c]] for c, t in zip(value.consumers, value.targets, strict=True)])
        needed.sort(axis=0)
        seconds = value.seconds[source, needed]
        seconds[1:][needed[1:] == needed[:-1]] = 0.0  # made once for all that need it
        total += seconds.sum(axis=0)
    return total
