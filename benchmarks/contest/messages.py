"""Lower bounds of large pairwise problems by sequential tree-reweighted message passing (Kolmogorov, TPAMI 2006), under
a memory limit whose multipliers follow the plans that the messages round to.

A sweep in one direction and one back never lower the bound; at the end it is near that of the tight linear relaxation.
Each sweep also rounds to a plan, node by node. Beliefs, messages and bound as in `common/trws`; the nodes of a level,
which have no edge between them, all send at once. Any order of the nodes is a valid one: the levels of the given order,
the longest path to each node, are cut into stretches that go side by side; what a stretch says to the next reaches it a
sweep later.

    x_n = argmin over x of a_n(x) + sum over m before n of b_mn(x_m, x) + sum over m after n of M_{m -> n}(x)

Implemented in `messages.Messages._send`, the rounding in `messages.Messages.rounded`. Where the recent plans overflow,
memory gets more expensive, where they leave room, cheaper; a step moves a given part of the total cost between times,
so that no scale has to be guessed.

    L(p) = the messages' bound of ( c(x) + sum_t p_t m_t(x) ) - sum_t p_t C
    p <- max(0, p + step x d),  d <- d / 2 + (m(x) / C - 1) / 2 at the rounded plan x

Implemented in `messages.Ascent.step` and `messages.PriceSteps.after`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common import clock
from benchmarks.contest.core_problem import Inner, NodeCosts, first_least
from benchmarks.contest.presolve import PairGraph

_STEP, _LEAST_STEP = 0.2, 0.01  # of the typical cost, at first; of the first step
_SLOWER = 10  # rounds until the step is halved
_RECENT = 0.5  # the weight of the plans before, in the direction
STRETCH = 64  # levels


class SameWidth(NamedTuple):
    """Edges whose senders have equally many choices: `cost` (those, the receivers' choices of all edges).

    `own` and `to`: which of the senders' choices and of the messages of the level; `heights`: choices of each receiver.
    """

    cost: Floats
    own: slice
    to: slice
    heights: Integers


class _EdgeTable(NamedTuple):
    """Of a node: the neighbour, places where the messages to and from it begin, `cost` (its choices, own choices)."""

    other: int
    to: int
    back: int
    cost: Floats


class LevelSends:
    """Edges from the nodes of one level, those of equally many choices of the sender together (`widths`).

    Of the senders' choices, edge by edge: `own`, the slot in the level, `back`, the place of the message against it,
    `below`, how many entries of `cost` it stands behind the sender's first. Of the receivers' choices: `to`, the place
    of the message, `first`, the entry for the sender's first choice, `edge`. Of the edges: `begin`, the first of the
    receiver's choices, `receiver`, `choices`, how many the sender has. `cost`: that of all `widths` in a row.
    """

    def __init__(self, edges: list[list[_EdgeTable]], begin: Integers) -> None:
        every = [(e, int(begin[k])) for k, node_edges in enumerate(edges) for e in node_edges]
        every.sort(key=lambda edge: edge[0].cost.shape[1])
        heights, widths = (np.array([e.cost.shape[i] for e, _ in every], np.int64) for i in (0, 1))
        starts, ends = (np.flatnonzero(np.diff(widths, **{side: 0})) for side in ("prepend", "append"))
        parts = [(int(a), int(b) + 1) for a, b in zip(starts, ends, strict=True)]
        tables = [np.concatenate([e.cost for e, _ in every[a:b]]).T for a, b in parts]
        cost = np.concatenate([np.zeros(0), *(table.reshape(-1) for table in tables)])
        rows, columns = (np.append(0, np.cumsum(sizes)) for sizes in (widths, heights))
        groups, first, stride, entries = list[SameWidth](), np.zeros(columns[-1], np.int64), np.zeros_like(widths), 0
        for a, b in parts:
            to = slice(int(columns[a]), int(columns[b]))
            size = (int(widths[a]), to.stop - to.start)
            block = cost[entries : entries + math.prod(size)].reshape(size)
            groups.append(SameWidth(block, slice(int(rows[a]), int(rows[b])), to, heights[a:b]))
            first[to], stride[a:b] = entries + np.arange(size[1]), size[1]
            entries += block.size
        self.own = _ranges([slot for _, slot in every], widths)
        self.below = _ranges([0] * len(every), widths) * np.repeat(stride, widths)
        self.back = _ranges([e.back for e, _ in every], widths)
        self.cost = cost
        self.widths = tuple(groups)
        self.to = _ranges([e.to for e, _ in every], heights)
        self.first = first
        self.edge = np.repeat(np.arange(len(every)), heights)
        self.begin = columns[:-1]
        self.receiver = np.array([e.other for e, _ in every], np.int64)
        self.choices = widths


class MessageLevel:
    """Nodes without an edge between them, and what they send `on`, to later levels, and `back`.

    Of the nodes: `nodes`, `begin`, the first slot, `share`. Of the slots: `slots`, their place among those of all
    nodes, `node`, which of the level's. Of the messages to them: `heard`, the places, `hears`, the slots;
    `heard_back`, `hears_back`: the same of those from later levels alone.
    """

    def __init__(self, nodes: list[int], edges: Sequence[list[_EdgeTable]], order: Integers, starts: Integers) -> None:
        sizes = np.array([starts[n + 1] - starts[n] for n in nodes], np.int64)
        begin = np.append(0, np.cumsum(sizes))[:-1]
        on, back = (
            [[e for e in edges[n] if (order[e.other] > order[n]) == later] for n in nodes] for later in (True, False)
        )
        self.nodes, self.begin = np.array(nodes, np.int64), begin
        self.share = 1.0 / np.maximum(1, [max(len(a), len(b)) for a, b in zip(on, back, strict=True)])
        self.slots = _ranges([int(starts[n]) for n in nodes], sizes)
        self.node = np.repeat(np.arange(len(nodes)), sizes)
        self.heard, self.hears = _heard([[*a, *b] for a, b in zip(on, back, strict=True)], sizes, begin)
        self.heard_back, self.hears_back = _heard(on, sizes, begin)
        self.on, self.back = LevelSends(on, begin), LevelSends(back, begin)


def levels(graph: PairGraph, order: Integers) -> tuple[list[MessageLevel], Integers]:
    """Those of the nodes, by `order`; of each place of a message its slot among those of all nodes."""
    sizes = [len(costs) for costs in graph.unary]
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
        members[order[n]].append(n)
    return [MessageLevel(nodes, edges, order, starts) for nodes in members if nodes], np.concatenate(hearer)


def _heard(edges: list[list[_EdgeTable]], sizes: Integers, begin: Integers) -> tuple[Integers, Integers]:
    every = [(e.back, k) for k, node_edges in enumerate(edges) for e in node_edges]
    size = [int(sizes[k]) for _, k in every]
    return _ranges([place for place, _ in every], size), _ranges([int(begin[k]) for _, k in every], size)


def _ranges(starts: Sequence[int], sizes: Sequence[int] | Integers) -> Integers:
    """start, start + 1, … of each, as many as its size."""
    size = np.asarray(sizes, np.int64)
    if not len(size):
        return np.zeros(0, np.int64)
    before = np.append(0, np.cumsum(size))[:-1]
    return np.arange(size.sum()) + np.repeat(np.asarray(starts, np.int64) - before, size)


def sweep_order(ends: Integers, count: int, stretch: int = STRETCH) -> Integers:
    """The level of each of `count` nodes, those without edges 0; no edge, `ends` (edges, 2), joins two of one level."""
    ascending = np.sort(ends, axis=1)
    depth = _depths(ascending, np.arange(count))
    return _depths(ascending, np.lexsort((np.arange(count), depth % stretch)))


def _depths(ends: Integers, order: Integers) -> Integers:
    """The longest path to each node, where edges lead along `order`."""
    place = np.argsort(order)
    before: list[list[int]] = [[] for _ in range(len(order))]
    for a, b in ends.tolist():
        early, late = (a, b) if place[a] < place[b] else (b, a)
        before[late].append(early)
    level = [0] * len(order)
    for n in order.tolist():
        level[n] = max((level[m] + 1 for m in before[n]), default=0)
    return np.array(level, np.int64)


class Messages:
    """`into`: all messages in a row; of each edge those to the first of its nodes, then those to the second."""

    def __init__(self, graph: PairGraph, stretch: int = STRETCH) -> None:
        pairs = np.array(list(graph.edges), np.int64).reshape(-1, 2)
        self.levels, self.hearer = levels(graph, sweep_order(pairs, len(graph.unary), stretch))
        self.into = np.zeros(len(self.hearer))

    def back(self, unary: NodeCosts) -> float:
        """A sweep from the last node to the first; the lower bound."""
        return sum(self._send(unary.row, level, level.back) for level in self.levels[::-1])

    def on(self, unary: NodeCosts) -> float:
        """A sweep from the first node to the last; the lower bound."""
        return sum(self._send(unary.row, level, level.on) for level in self.levels)

    def _send(self, unary: Floats, level: MessageLevel, sent: LevelSends) -> float:
        """What a level tells in one direction; what it raises the bound by."""
        clock.check()
        belief = unary[level.slots] + np.bincount(level.hears, self.into[level.heard], len(level.slots))
        least = np.minimum.reduceat(belief, level.begin)
        total = float(least.sum())
        if not len(sent.to):
            return total
        belief = (belief - least[level.node]) * level.share[level.node]
        outgoing = belief[sent.own] - self.into[sent.back]
        message = np.empty(len(sent.to))
        for same in sent.widths:
            each = outgoing[same.own].reshape(-1, len(same.cost)).T
            np.min(same.cost + np.repeat(each, same.heights, axis=1), axis=0, out=message[same.to])
        least = np.minimum.reduceat(message, sent.begin)
        self.into[sent.to] = message - least[sent.edge]
        return total + float(least.sum())

    def beliefs(self, unary: NodeCosts) -> NodeCosts:
        """Of each node what its choices cost with all that it was told."""
        received = np.bincount(self.hearer, self.into, len(unary.row))
        return NodeCosts(unary.row + received, unary.ends)

    def rounded(self, unary: NodeCosts) -> Integers:
        """After `back`: each node's best choice given those before it and the messages of those after it."""
        choice = np.zeros(len(unary.ends), np.int64)
        for level in self.levels:
            received = np.bincount(level.hears_back, self.into[level.heard_back], len(level.slots))
            costs = unary.row[level.slots] + received
            back = level.back
            if len(back.own):
                first = back.first[back.begin + choice[back.receiver]]
                costs += np.bincount(back.own, back.cost[np.repeat(first, back.choices) + back.below], len(costs))
            choice[level.nodes] = first_least(costs, level.begin, level.node) - level.begin
        return choice


class Round(NamedTuple):
    """`bound` of this round at `multipliers` (times,); `choice`: the plan it rounds to, whatever its memory."""

    bound: float
    multipliers: Floats
    choice: Integers


class PriceSteps:
    """Steps of prices (times,) to where plans overflow: `first` and at least `least` times that of what all cost."""

    def __init__(self, first: float, least: float) -> None:
        self.first, self.least, self.number = first, least, 0
        self.direction: Floats | None = None

    def after(self, prices: Floats, over: Floats, typical: float) -> Floats:
        """The next prices; `over`: by which part of the capacity the plan overflows at each time; `typical`: what all
        costs, by a unit of memory."""
        self.direction = over if self.direction is None else _RECENT * self.direction + (1 - _RECENT) * over
        part = max(self.least, 1.0 / (1.0 + self.number / _SLOWER))
        self.number += 1
        move = np.where((self.direction < 0) & (prices <= 0), 0.0, self.direction)
        length = float(np.abs(move).sum())
        return np.maximum(0.0, prices + self.first * typical * part * move / length) if length > 0 else prices


class Ascent:
    """`bound`: the best so far, at `multipliers`. Every bound is valid."""

    def __init__(self, core: Inner) -> None:
        self.core, self.messages = core, Messages(core.graph)
        self.limited = bool(np.isfinite(core.items.capacity) and core.items.capacity > 0)
        self.now = self.multipliers = np.zeros(len(core.items.base))
        self.unary = core.priced(self.multipliers)
        self.steps = PriceSteps(_STEP, _LEAST_STEP)
        self.typical = np.inf
        self.bound = -np.inf

    def step(self, *, move: bool = True) -> Round:
        """One sweep each way; then the multipliers move, unless told not to."""
        items, multipliers = self.core.items, self.now
        self.messages.on(self.unary)
        free = items.capacity - items.base if self.limited else 0.0 * items.base
        bound = self.messages.back(self.unary) + self.core.graph.constant - float(multipliers @ free)
        choice = self.messages.rounded(self.unary)
        if bound > self.bound:
            self.bound, self.multipliers = bound, multipliers
        if self.limited and move:
            self._move(choice, bound)
        return Round(bound, multipliers, choice)

    def to(self, multipliers: Floats) -> None:
        """Goes on from other multipliers."""
        self.now, self.steps.direction = multipliers, None
        self.unary = self.core.priced(multipliers)

    def beliefs(self) -> NodeCosts:
        """What each choice costs beyond the best of its node, as far as the messages tell."""
        return self.messages.beliefs(self.unary).above_least()

    def _move(self, choice: Integers, bound: float) -> None:
        items, cost = self.core.items, self.core.cost(choice)
        self.typical = min(self.typical, cost if np.isfinite(cost) else abs(bound))
        over = items.alive(choice) / items.capacity - 1.0
        self.now = self.steps.after(self.now, over, self.typical / items.capacity)
        self.unary = self.core.priced(self.now)
