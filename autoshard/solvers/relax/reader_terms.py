"""An additive problem with its values taken apart by reader: lower bounds that are cheap to minimise.

Each reader pays a share of the layout that it needs, its seconds and its priced bytes over the reader's own span. A
plan pays at least that: the shares of a layout add up to at most 1, and no reader's span is longer than what all of a
layout's readers keep it for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard.ir.problem import MANY, Floats, Integers, Problem, Value, changed
from autoshard.solvers.elimination.weighted_sum import Additive, charge, scaled, unary


class _Once:
    """Arrays by what they are made of, so that what is alike stays one object. `keep` holds what a key names by id."""

    def __init__(self) -> None:
        self.known: dict[Hashable, tuple[Floats, tuple[object, ...]]] = {}

    def __call__(self, key: Hashable, make: Callable[[], Floats], *keep: object) -> Floats:
        if key not in self.known:
            self.known[key] = make(), keep
        return self.known[key][0]


def many(problem: Problem) -> tuple[frozenset[int], tuple[int, ...]]:
    """The values that are always cut off, and the views among what they are made of: nodes that read only values with
    many readers, or what is made of these alone.

    A view that is read by several, such as each layer's view of a rotary table, would tie these together for little.
    """
    read: list[list[int]] = [[] for _ in problem.nodes]
    produced: list[list[int]] = [[] for _ in problem.nodes]
    for v, value in enumerate(problem.values):
        produced[value.producer].append(v)
        for consumer in value.consumers:
            read[consumer].append(v)
    waiting = [v for v, value in enumerate(problem.values) if len(value.consumers) > MANY]
    hub_values = set(waiting)  # of many readers, or made of such
    alone: dict[int, None] = {}
    while waiting:
        for consumer in problem.values[waiting.pop()].consumers:
            if consumer not in alone and hub_values.issuperset(read[consumer]):
                alone[consumer] = None
                waiting += (more := [v for v in produced[consumer] if v not in hub_values])
                hub_values.update(more)
    cut = frozenset(v for v in hub_values if len(problem.values[v].consumers) > 1)
    views: set[int] = set()
    for n in reversed(alone):  # readers come later
        if any(v in cut or not views.isdisjoint(problem.values[v].consumers) for v in produced[n]):
            views.add(n)
    return cut, tuple(sorted(views))


def kinds(problem: Problem) -> list[int]:
    """A number for each value, equal for values that are alike."""
    numbers: dict[Hashable, int] = {}
    keys = [(id(value.seconds), id(value.source), *map(id, value.targets)) for value in problem.values]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def apart(sum_: Additive, kinds: Sequence[int], shares: Mapping[int, Floats], cut: Collection[int]) -> Problem:
    """Problem with values by pairs, without memory: bytes are in the seconds, at their price. Those in `cut` are cut
    off.

    `kinds[v]`: the same of values with the same `shares`, of shape (readers, targets); even ones where absent.
    """
    problem, once = sum_.problem, _Once()
    node_costs = [_unary(sum_, n, once) for n in range(len(problem.nodes))]
    values = []
    for v, (value, kind) in enumerate(zip(problem.values, kinds, strict=True)):
        count = len(value.consumers)
        share = shares.get(kind)
        for i, (consumer, target) in enumerate(zip(value.consumers, value.targets, strict=True)):
            per_byte = charge(sum_, value.intervals[i])
            if count == 1 and v not in cut and not per_byte and sum_.scale == 1.0:
                values.append(value if value.intervals[0] == (0, 0) else _pair(value, consumer, target, value.seconds))
                continue
            key = (id(value.seconds), id(value.bytes), kind, i, per_byte)
            even = 1.0 / count if share is None else share[i]
            pairs = once(key, lambda v=value, c=per_byte, s=even: _part(_priced(sum_, v, c), s), value)  # type: ignore[misc]
            if v in cut:
                node_costs[consumer] = _with_least(node_costs[consumer], pairs, target, once)
            else:
                values.append(_pair(value, consumer, target, pairs))
    return _bare(problem, node_costs, values)


def without_hubs(sum_: Additive, cut: Collection[int]) -> Problem:
    """Problem with only the values of `cut` taken apart, to be minimised under the same prices.

    Their bytes count in the seconds, and so not where the scale is 0.
    """
    problem, once = sum_.problem, _Once()
    node_costs = [node.seconds for node in problem.nodes]
    values = []
    for v, value in enumerate(problem.values):
        count = len(value.consumers)
        if v not in cut:
            values.append(value)
            continue
        for consumer, target, span in zip(value.consumers, value.targets, value.intervals, strict=True):
            per_byte = charge(sum_, span) / sum_.scale if sum_.scale else 0.0
            key = (id(value.seconds), id(value.bytes), count, per_byte)
            pairs = once(key, lambda v=value, c=per_byte, n=count: (v.seconds + c * v.bytes) / n, value)  # type: ignore[misc]
            node_costs[consumer] = _with_least(node_costs[consumer], pairs, target, once)
    nodes = tuple(
        node if node.seconds is seconds else changed(node, seconds=seconds)
        for node, seconds in zip(problem.nodes, node_costs, strict=True)
    )
    return replace(problem, nodes=nodes, values=tuple(values), capacity_bytes=float("inf"))


def _unary(sum_: Additive, n: int, once: _Once) -> Floats:
    node = sum_.problem.nodes[n]
    per_byte = charge(sum_, node.interval)
    if not per_byte and sum_.scale == 1.0:
        return node.seconds
    return once((id(node.seconds), id(node.bytes), per_byte), lambda: unary(sum_, n), node)


def _priced(sum_: Additive, value: Value, per_byte: float) -> Floats:
    """(sources, targets)"""
    seconds = scaled(sum_, value.seconds)
    return seconds + per_byte * value.bytes if per_byte else seconds


def _part(seconds: Floats, share: float | Floats) -> Floats:
    """A forbidden pair stays forbidden, whatever the share."""
    forbidden = np.isinf(seconds)
    return np.where(forbidden, np.inf, np.where(forbidden, 0.0, seconds) * share)


def _with_least(costs: Floats, pairs: Floats, target: Integers, once: _Once) -> Floats:
    return once((id(costs), id(pairs), id(target)), lambda: costs + pairs.min(axis=0)[target], costs, pairs, target)


def _pair(value: Value, consumer: int, target: Integers, seconds: Floats) -> Value:
    return changed(value, consumers=(consumer,), targets=(target,), seconds=seconds, intervals=((0, 0),))


def _bare(problem: Problem, node_costs: Sequence[Floats], values: Sequence[Value]) -> Problem:
    nodes = tuple(
        node if node.seconds is seconds and node.interval == (0, 0) else changed(node, seconds=seconds, interval=(0, 0))
        for node, seconds in zip(problem.nodes, node_costs, strict=True)
    )
    return replace(problem, nodes=nodes, values=tuple(values), capacity_bytes=float("inf"))
