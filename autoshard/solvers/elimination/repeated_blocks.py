"""Repetition in a problem: equal blocks of nodes, one after the other, such as the layers of a model.

Nodes stand in a line, in order of index, one that only produces just before its first consumer. Each gets a code of all
that it depends on: its costs, and those of every value it takes part in with the distances to the other nodes. A
stretch of the line whose codes recur at a fixed distance is a run. All in a few passes over integer arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import MANY, Integers, Problem
from autoshard.solvers.common import clock
from autoshard.solvers.common.effort import ROUNDS
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.weighted_sum import Additive

LEAST_BLOCKS = 3  # that are worth folding


@dataclass(frozen=True)
class BlockRun:
    """Positions start <= i < stop have the codes of i + period, while that is below stop. `reach`: the longest distance
    between two nodes of one value there."""

    start: int
    stop: int
    period: int
    reach: int


@dataclass(frozen=True, eq=False)
class Line:
    """The nodes in a line. `nodes[position]`, `positions[node]`; of each value its `first` and `last` position."""

    nodes: Integers
    positions: Integers
    first: Integers
    last: Integers


@dataclass(frozen=True, eq=False)
class _EndCodes:
    """Codes of every (value, node) pair: the producer of each value first, then all consumers, value by value."""

    producers: Integers
    consumers: Integers
    counts: Integers  # of consumers
    of: Integers  # the value of each consumer


def _ends(problem: Problem) -> _EndCodes:
    values = problem.values
    producers = np.fromiter((value.producer for value in values), np.int64, len(values))
    counts = np.fromiter((len(value.consumers) for value in values), np.int64, len(values))
    consumers = np.fromiter(chain.from_iterable(value.consumers for value in values), np.int64, int(counts.sum()))
    return _EndCodes(producers, consumers, counts, np.repeat(np.arange(len(values)), counts))


def line(problem: Problem) -> Line:
    """The order in which repeated blocks stand one after the other."""
    return _line(problem, _ends(problem))


def _line(problem: Problem, ends: _EndCodes) -> Line:
    count = len(problem.nodes)
    key = np.arange(count, dtype=float)
    use = np.full(count, np.inf)
    np.minimum.at(use, ends.producers[ends.of], ends.consumers)
    consumes = np.zeros(count, dtype=bool)
    consumes[ends.consumers] = True
    only = ~consumes & np.isfinite(use)
    key[only] = use[only] - 0.5
    nodes = np.lexsort((np.arange(count), key))
    positions = np.empty(count, dtype=np.int64)
    positions[nodes] = np.arange(count)
    first, last = positions[ends.producers].copy(), positions[ends.producers].copy()
    np.minimum.at(first, ends.of, positions[ends.consumers])
    np.maximum.at(last, ends.of, positions[ends.consumers])
    return Line(nodes, positions, first, last)


def runs(sum_: Additive, contents: Contents) -> tuple[Line, list[BlockRun]]:
    """The line of the problem's nodes, and disjoint runs in it, in order."""
    ends = _ends(sum_.problem)
    placed = _line(sum_.problem, ends)
    codes = _codes(sum_, contents, ends, placed)
    block_runs: list[BlockRun] = []
    waiting = [(0, len(codes))]
    while waiting:
        clock.check()
        low, high = waiting.pop()
        run = _longest(codes[low:high])
        if run is not None:
            start, stop, period = low + run[0], low + run[1], run[2]
            inside = _inside(ends, placed, start, stop)
            block_runs.append(BlockRun(start, stop, period, int((placed.last - placed.first)[inside].max(initial=0))))
            waiting += [(low, start), (stop, high)]
    return placed, sorted(block_runs, key=lambda run: run.start)


def _inside(ends: _EndCodes, placed: Line, start: int, stop: int) -> NDArray[np.bool_]:
    """The values with a node at a position from start to stop; one that passes over all of them has none."""

    def within(nodes: Integers) -> NDArray[np.bool_]:
        return (placed.positions[nodes] >= start) & (placed.positions[nodes] < stop)

    inside = within(ends.producers)
    inside[ends.of[within(ends.consumers)]] = True
    return inside


def _longest(codes: Integers) -> tuple[int, int, int] | None:
    """(start, stop, period) of the longest stretch of at least three blocks; of equally long ones the least period."""
    order = np.argsort(codes, kind="stable")
    same = codes[order[1:]] == codes[order[:-1]]
    distances = (order[1:] - order[:-1])[same]
    counts = np.bincount(distances, minlength=1)
    best = None
    for period in np.argsort(-counts, kind="stable")[:ROUNDS]:
        if not counts[period] or LEAST_BLOCKS * period > len(codes):
            continue
        equal = np.concatenate([[False], codes[period:] == codes[:-period], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1]).reshape(-1, 2)
        lengths = edges[:, 1] - edges[:, 0]
        at = int(np.argmax(lengths)) if len(lengths) else -1
        if at < 0 or lengths[at] < (LEAST_BLOCKS - 1) * period:
            continue
        here = int(edges[at, 0]), int(edges[at, 1] + period), int(period)
        if best is None or (here[1] - here[0], -here[2]) > (best[1] - best[0], -best[2]):
            best = here
    return best


def _codes(sum_: Additive, contents: Contents, ends: _EndCodes, placed: Line) -> Integers:
    """A number for each position, equal where everything that a node's cost depends on is."""
    nodes, values = sum_.problem.nodes, sum_.problem.values
    charged = bool(sum_.cumulative[-1] > 0)
    node_codes = [_numbers(contents, [node.seconds for node in nodes])]
    if charged:
        spans = np.array([node.interval for node in nodes], dtype=np.int64).reshape(-1, 2)
        node_codes += [_numbers(contents, [node.bytes for node in nodes]), *_charges(sum_, spans)]
    code = _coded([column[placed.nodes] for column in node_codes])
    value = _value_codes(sum_, contents, ends, placed, charged)
    role = np.arange(len(ends.of)) - np.repeat(np.cumsum(ends.counts) - ends.counts, ends.counts) + 1
    part = np.concatenate([np.zeros(len(values), np.int64), np.minimum(role, MANY + 1)])
    at = np.concatenate([placed.positions[ends.producers], placed.positions[ends.consumers]])
    part = _coded([np.concatenate([value, value[ends.of]]), part])
    order = np.lexsort((part, at))
    at, part = at[order], part[order]
    rank = np.arange(len(at)) - np.searchsorted(at, at)
    columns = [code]
    for k in range(int(rank.max(initial=-1)) + 1):
        column = np.zeros(len(nodes), np.int64)
        column[at[rank == k]] = part[rank == k] + 1
        columns.append(column)
    return _coded(columns)


def _value_codes(sum_: Additive, contents: Contents, ends: _EndCodes, placed: Line, charged: bool) -> Integers:
    """A number for each value: equal content, and equal distances from the producer. A hub is equal to itself alone."""
    values = sum_.problem.values
    hub = ends.counts > MANY
    columns = [ends.counts, np.where(hub, np.arange(len(values)) + 1, 0)]
    columns.append(_numbers(contents, [value.source for value in values]))
    columns.append(_numbers(contents, [value.seconds for value in values]))
    rows = [_numbers(contents, list(chain.from_iterable(value.targets for value in values)))]
    rows.append(placed.positions[ends.consumers] - placed.positions[ends.producers][ends.of])
    if charged:
        columns.append(_numbers(contents, [value.bytes for value in values]))
        flat = chain.from_iterable(chain.from_iterable(value.intervals for value in values))
        rows += _charges(sum_, np.fromiter(flat, np.int64).reshape(-1, 2))
    row = _coded(rows)
    first = np.cumsum(ends.counts) - ends.counts
    for k in range(min(MANY, int(ends.counts.max(initial=0)))):
        column = np.zeros(len(values), np.int64)
        there = ends.counts > k
        column[there] = row[first[there] + k] + 1
        columns.append(column)
    return _coded(columns)


def _charges(sum_: Additive, spans: Integers) -> list[Integers]:
    """Codes of each span's ends by price: they decide the price of a byte over it, and over the hull of several."""
    alive = spans[:, 0] < spans[:, 1]
    edges = np.where(alive[:, None], sum_.cumulative[np.where(alive[:, None], spans, 0)], -1.0)
    return [np.unique(edges[:, side], return_inverse=True)[1].reshape(-1) for side in (0, 1)]


def _numbers(contents: Contents, arrays: Sequence[NDArray[np.generic]]) -> Integers:
    """The number of each array by content."""
    return np.fromiter(map(contents.number, arrays), np.int64, len(arrays))


def _coded(columns: Sequence[Integers]) -> Integers:
    """Small numbers, equal where all columns are."""
    code, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        if not len(column):
            return code
        low, more = int(column.min()), int(column.max()) - int(column.min()) + 1
        if size * more >= 1 << 62:
            code = np.unique(code, return_inverse=True)[1].reshape(-1)
            size = int(code.max()) + 1
        code, size = code * more + (column - low), size * more
    return np.unique(code, return_inverse=True)[1].reshape(-1)
