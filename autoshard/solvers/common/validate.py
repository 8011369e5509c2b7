"""Checks of what every solver relies on, made once for all: one sentence names the node or value and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import UsageError
from autoshard.ir.problem import Node, Problem, Value


def check(problem: Problem) -> None:
    """Raises UsageError where the problem is not one: empty choice sets, NaN or negative costs, wrong indices."""
    if math.isnan(problem.capacity_bytes) or problem.capacity_bytes < 0:
        raise UsageError(f"the memory capacity is {problem.capacity_bytes} bytes: expected 0 or more")
    for node in {(id(node.seconds), id(node.bytes)): node for node in problem.nodes}.values():
        _check_node(node)  # the arrays of repeated layers are the same objects: looked at once
    alive = [edge for node in problem.nodes for edge in node.interval]
    if min(alive, default=0) < 0 or max(alive, default=0) > problem.horizon:
        for node in problem.nodes:
            _inside(problem, node.name, node.interval)
    values: Iterable[Value] = problem.values
    if _plausible(problem):
        values = {(id(v.seconds), id(v.bytes), id(v.source), *map(id, v.targets)): v for v in values}.values()
    for value in values:
        _check_ends(problem, value)
        _check_value(problem, value)


def check_pins(problem: Problem, pinned: Mapping[int, int]) -> None:
    """Raises UsageError where a pin names a node or a choice that does not exist."""
    for n, s in sorted(pinned.items()):
        if not 0 <= n < len(problem.nodes):
            raise UsageError(f"node {n} is pinned: expected 0 to {len(problem.nodes) - 1}")
        if not 0 <= s < len(problem.nodes[n].seconds):
            count = len(problem.nodes[n].seconds)
            raise UsageError(f"{problem.nodes[n].name} is pinned to its choice {s}: expected 0 to {count - 1}")


def _check_node(node: Node) -> None:
    if node.seconds.ndim != 1 or len(node.seconds) == 0:
        raise UsageError(f"{node.name}: its set of choices is empty")
    if node.bytes.shape != node.seconds.shape:
        raise UsageError(f"{node.name}: {len(node.seconds)} choices but sizes of shape {node.bytes.shape}")
    _not_negative(node.name, "cost", node.seconds)
    _finite_sizes(node.name, node.bytes)


def _plausible(problem: Problem) -> bool:
    """True if ends, spans and numbers of choices of all values are right, checked for all at once."""
    values = problem.values
    counts = np.fromiter([len(value.consumers) for value in values], np.int64, len(values))
    if not len(values) or not counts.min():
        return False
    nodes = np.fromiter(chain.from_iterable((value.producer, *value.consumers) for value in values), np.int64)
    spans = np.fromiter(chain.from_iterable(chain.from_iterable(value.intervals for value in values)), np.int64)
    layouts = np.fromiter(map(len, chain.from_iterable((value.source, *value.targets) for value in values)), np.int64)
    if nodes.min() < 0 or nodes.max() >= len(problem.nodes) or spans.min() < 0 or spans.max() > problem.horizon:
        return False
    targets = np.fromiter([len(value.targets) for value in values], np.int64, len(values))
    if (targets != counts).any() or len(spans) != 2 * counts.sum():
        return False
    sizes = np.fromiter([len(node.seconds) for node in problem.nodes], np.int64, len(problem.nodes))
    ends = np.sort(np.repeat(np.arange(len(counts)), counts + 1) * (len(problem.nodes) + 1) + nodes)
    return bool((sizes[nodes] == layouts).all() and (ends[1:] != ends[:-1]).all())


def _check_ends(problem: Problem, value: Value) -> None:
    ends = (value.producer, *value.consumers)
    if any(not 0 <= n < len(problem.nodes) for n in ends):
        raise UsageError(f"{value.name}: its nodes are {list(ends)}, expected 0 to {len(problem.nodes) - 1}")
    if len(set(ends)) < len(ends) or not value.consumers:
        raise UsageError(
            f"{value.name}: its nodes are {list(ends)}, expected a producer and other, different consumers"
        )
    for interval in value.intervals:
        _inside(problem, value.name, interval)


def _check_value(problem: Problem, value: Value) -> None:
    layouts = (value.source, *value.targets)
    sizes = tuple(len(problem.nodes[n].seconds) for n in (value.producer, *value.consumers))
    if tuple(map(len, layouts)) != sizes or len(value.intervals) != len(value.consumers):
        raise UsageError(f"{value.name}: its layouts don't match its nodes' numbers of choices {sizes}")
    rows, columns = value.seconds.shape
    _layouts(value.name, "source", value.source, rows)
    for targets in value.targets:
        _layouts(value.name, "target", targets, columns)
    if value.bytes.shape != (columns,):
        raise UsageError(f"{value.name}: {columns} target layouts but sizes of shape {value.bytes.shape}")
    _not_negative(value.name, "cost", value.seconds)
    _finite_sizes(value.name, value.bytes)


def _not_negative(name: str, what: str, costs: NDArray[np.float64]) -> None:
    wrong = costs[~(costs >= 0)]
    if wrong.size:
        raise UsageError(f"{name}: a {what} is {wrong.flat[0]}, expected 0 or more (infinity forbids)")


def _finite_sizes(name: str, sizes: NDArray[np.float64]) -> None:
    wrong = sizes[~((sizes >= 0) & np.isfinite(sizes))]
    if wrong.size:
        raise UsageError(f"{name}: a size is {wrong.flat[0]} bytes, expected 0 or more and finite")


def _layouts(name: str, which: str, layouts: NDArray[np.int64], count: int) -> None:
    if layouts.min() < 0 or layouts.max() >= count:
        raise UsageError(f"{name}: {which} layouts {layouts.min()} to {layouts.max()}, expected 0 to {count - 1}")


def _inside(problem: Problem, name: str, interval: tuple[int, int]) -> None:
    start, stop = interval
    if start < stop and (start < 0 or stop > problem.horizon):
        raise UsageError(f"{name}: alive over {interval}, expected times from 0 to {problem.horizon}")
