"""The tables that messages of a level are made from, each in one row, so that a level sends at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers
from benchmarks.contest.presolve import PairGraph


class SameWidth(NamedTuple):
    """Edges whose senders have equally many choices: `cost` (those, the receivers' choices of all edges).

    `own` and `to`: which of the senders' choices and of the messages of the level; `heights`: choices of each receiver.
    """

    cost: Floats
    own: slice
    to: slice
    heights: Integers


class LevelSends(NamedTuple):
    """Edges from the nodes of one level, those of equally many choices of the sender together (`widths`).

    Of the senders' choices, edge by edge: `own`, the slot in the level, `back`, the place of the message against it,
    `below`, how many entries of `cost` it stands behind the sender's first. Of the receivers' choices: `to`, the place
    of the message, `first`, the entry for the sender's first choice, `edge`. Of the edges: `begin`, the first of the
    receiver's choices, `receiver`, `choices`, how many the sender has. `cost`: that of all `widths` in a row.
    """

    own: Integers
    below: Integers
    back: Integers
    cost: Floats
    widths: tuple[SameWidth, ...]
    to: Integers
    first: Integers
    edge: Integers
    begin: Integers
    receiver: Integers
    choices: Integers


class MessageLevel(NamedTuple):
    """Nodes without an edge between them, and what they send `on`, to later levels, and `back`.

    Of the nodes: `nodes`, `begin`, the first slot, `share`. Of the slots: `slots`, their place among those of all
    nodes, `node`, which of the level's. Of the messages to them: `heard`, the places, `hears`, the slots;
    `heard_back`, `hears_back`: the same of those from later levels alone.
    """

    nodes: Integers
    begin: Integers
    share: Floats
    slots: Integers
    node: Integers
    heard: Integers
    hears: Integers
    heard_back: Integers
    hears_back: Integers
    on: LevelSends
    back: LevelSends


class _EdgeTable(NamedTuple):
    """Of a node: the neighbour, places where the messages to and from it begin, `cost` (its choices, own choices)."""

    other: int
    to: int
    back: int
    cost: Floats


def levels(graph: PairGraph, order: Integers) -> tuple[list[MessageLevel], Integers]:
    """Those of the nodes with edges, by `order`; of each place of a message its slot among those of all nodes."""
    sizes = [len(own) for own in graph.unary]
    starts = np.append(0, np.cumsum(sizes, dtype=np.int64))
    edges: list[list[_EdgeTable]] = [[] for _ in sizes]
    place, hearer = 0, [np.zeros(0, np.int64)]
    for (a, b), cost in graph.edges.items():
        to_b = place + sizes[a]
        edges[a].append(_EdgeTable(b, to_b, place, cost.T))
        edges[b].append(_EdgeTable(a, place, to_b, cost))
        hearer += [np.arange(starts[n], starts[n + 1]) for n in (a, b)]
        place = to_b + sizes[b]
    members: list[list[int]] = [[] for _ in range(int(order.max(initial=-1)) + 1)]
    for n in np.argsort(order, kind="stable").tolist():
        if edges[n]:
            members[order[n]].append(n)
    return [_level(nodes, edges, order, starts) for nodes in members if nodes], np.concatenate(hearer)


def _level(nodes: list[int], edges: Sequence[list[_EdgeTable]], order: Integers, starts: Integers) -> MessageLevel:
    sizes = np.array([starts[n + 1] - starts[n] for n in nodes], np.int64)
    begin = np.append(0, np.cumsum(sizes))[:-1]
    on, back = (
        [[e for e in edges[n] if (order[e.other] > order[n]) == later] for n in nodes] for later in (True, False)
    )
    heard, hears = _heard([[*a, *b] for a, b in zip(on, back, strict=True)], sizes, begin)
    return MessageLevel(
        np.array(nodes, np.int64),
        begin,
        1.0 / np.maximum(1, [max(len(a), len(b)) for a, b in zip(on, back, strict=True)]),
        _ranges([int(starts[n]) for n in nodes], sizes),
        np.repeat(np.arange(len(nodes)), sizes),
        heard,
        hears,
        *_heard(on, sizes, begin),
        _sent(on, begin),
        _sent(back, begin),
    )


def _heard(edges: list[list[_EdgeTable]], sizes: Integers, begin: Integers) -> tuple[Integers, Integers]:
    every = [(e.back, k) for k, own in enumerate(edges) for e in own]
    size = [int(sizes[k]) for _, k in every]
    return _ranges([place for place, _ in every], size), _ranges([int(begin[k]) for _, k in every], size)


def _sent(edges: list[list[_EdgeTable]], begin: Integers) -> LevelSends:
    every = [(e, int(begin[k])) for k, own in enumerate(edges) for e in own]
    every.sort(key=lambda edge: edge[0].cost.shape[1])
    heights, widths = (np.array([e.cost.shape[i] for e, _ in every], np.int64) for i in (0, 1))
    starts, ends = (np.flatnonzero(np.diff(widths, **{side: 0})) for side in ("prepend", "append"))
    parts = [(int(a), int(b) + 1) for a, b in zip(starts, ends, strict=True)]
    tables = [np.concatenate([e.cost for e, _ in every[a:b]]).T for a, b in parts]
    cost = np.concatenate([np.zeros(0), *(table.reshape(-1) for table in tables)])
    rows, columns = (np.append(0, np.cumsum(sizes)) for sizes in (widths, heights))
    made, first, stride, entries = list[SameWidth](), np.zeros(columns[-1], np.int64), np.zeros_like(widths), 0
    for a, b in parts:
        to = slice(int(columns[a]), int(columns[b]))
        size = (int(widths[a]), to.stop - to.start)
        block = cost[entries : entries + math.prod(size)].reshape(size)
        made.append(SameWidth(block, slice(int(rows[a]), int(rows[b])), to, heights[a:b]))
        first[to], stride[a:b] = entries + np.arange(size[1]), size[1]
        entries += block.size
    return LevelSends(
        own=_ranges([slot for _, slot in every], widths),
        below=_ranges([0] * len(every), widths) * np.repeat(stride, widths),
        back=_ranges([e.back for e, _ in every], widths),
        cost=cost,
        widths=tuple(made),
        to=_ranges([e.to for e, _ in every], heights),
        first=first,
        edge=np.repeat(np.arange(len(every)), heights),
        begin=columns[:-1],
        receiver=np.array([e.other for e, _ in every], np.int64),
        choices=widths,
    )


def _ranges(starts: Sequence[int], sizes: Sequence[int] | Integers) -> Integers:
    """start, start + 1, … of each, as many as its size."""
    size = np.asarray(sizes, np.int64)
    if not len(size):
        return np.zeros(0, np.int64)
    before = np.append(0, np.cumsum(size))[:-1]
    places: Integers = np.arange(size.sum()) + np.repeat(np.asarray(starts, np.int64) - before, size)
    return places
