"""The core of a large problem: what is left after contraction, with its memory, and the way back; and sections of it.

What the choices of all nodes have, costs, or which are looked at, stands in one row (`NodeRow`).

A node of the core may stand for many nodes of the problem, so one of its choices uses memory over several spans. Each
span is an *item*: a vector of bytes over the choices of its node. What every plan uses is in `base`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem, Value, memory
from benchmarks.contest.presolve import Contracted, NodeWithoutChoice, PairGraph, contracted

Kind = TypeVar("Kind", bound=np.generic)
_ROUNDING = 1e-12  # of the capacity: nearer to it, only the problem's own sums tell whether a plan fits


class NodeRow(Generic[Kind]):
    """`row`: the entries of all nodes; those of node n end before `ends[n]`, and are `self[n]`, a view."""

    def __init__(self, row: NDArray[Kind], ends: Integers) -> None:
        self.row, self.ends = row, ends

    def __getitem__(self, n: int) -> NDArray[Kind]:
        return self.row[self.ends[n - 1] if n else 0 : self.ends[n]]

    def __iter__(self) -> Iterator[NDArray[Kind]]:
        return iter(np.split(self.row, self.ends[:-1]) if len(self.ends) else [])

    @property
    def sizes(self) -> Integers:
        return np.diff(self.ends, prepend=0)


class NodeCosts(NodeRow[np.float64]):
    """What the choices of each node cost."""

    def above_least(self) -> NodeCosts:
        """Each less the least of its node."""
        if not len(self.ends):
            return self
        begin = np.append(0, self.ends[:-1])
        return NodeCosts(self.row - np.repeat(np.minimum.reduceat(self.row, begin), self.sizes), self.ends)


def first_least(costs: Floats, begin: Integers, node: Integers) -> Integers:
    """The place of the first least cost of each node, whose costs begin at `begin` (nodes,); `node` of each cost."""
    least = np.flatnonzero(costs == np.minimum.reduceat(costs, begin)[node])
    first = np.flatnonzero(np.diff(node[least], prepend=-1))
    assert len(first) == len(begin), "a node without a least cost"
    return least[first]


NodeChoices = NodeRow[np.int64]  # of each node its choices that are looked at, ascending


def cheapest(costs: NodeCosts, width: int, choice: Integers | None = None) -> NodeChoices:
    """Of each node the `width` cheapest, the first of equals, and that of `choice`."""
    sizes = costs.sizes
    begin = costs.ends - sizes
    node = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((costs.row, node))  # stable
    taken = np.zeros(len(node), bool)
    taken[order[np.arange(len(node)) - begin[node] < width]] = True
    if choice is not None:
        taken[begin + choice] = True
    slots = np.flatnonzero(taken)
    return NodeChoices(slots - begin[node[slots]], np.cumsum(np.bincount(node[slots], minlength=len(sizes))))


def either(one: Integers, other: Integers) -> NodeChoices:
    """Of each node what two plans choose."""
    pairs = np.sort(np.stack([one, other], axis=1), axis=1)
    taken = np.ones(pairs.shape, bool)
    taken[:, 1] = one != other
    return NodeChoices(pairs[taken], np.cumsum(taken.sum(axis=1)))


class Items:
    """Item i belongs to `node[i]`, is alive at times low[i] <= t < high[i], and has `bytes[first[i] + choice]`.

    `base[t]` (times,): bytes of every plan. `capacity`: for the sum. Of each entry of `bytes`: `owner`, its item, and
    `slot`, its place when the choices of all nodes stand in one row, where those of node n end before `ends[n]`.
    """

    def __init__(
        self, entries: Sequence[tuple[int, int, int, Floats]], base: Floats, capacity: float, ends: Integers
    ) -> None:
        """`entries`: node, low, high and bytes of each item."""
        self.node, self.low, self.high = np.array([entry[:3] for entry in entries], np.int64).reshape(-1, 3).T
        lengths = np.array([len(entry[3]) for entry in entries], np.int64)
        self.first = np.cumsum(lengths) - lengths
        self.bytes = np.concatenate([entry[3] for entry in entries]) if entries else np.zeros(0)
        self.base, self.capacity, self.ends = base, capacity, ends
        self.owner = np.repeat(np.arange(len(entries)), lengths)
        self.slot = np.arange(len(self.owner)) - self.first[self.owner] + np.append(0, ends)[self.node][self.owner]

    def alive(self, choice: Integers) -> Floats:
        """Bytes at each time, shape (times,)."""
        return self.over_time(self.bytes[self.first + choice[self.node]])

    def priced(self, unary: Floats, multipliers: Floats) -> NodeCosts:
        """The costs of all choices, in one row, with their bytes at `multipliers` (times,) added."""
        total = np.concatenate([[0.0], np.cumsum(multipliers)])
        price = total[self.high] - total[self.low]
        priced = np.bincount(self.slot, self.bytes * price[self.owner], int(self.ends[-1]) if len(self.ends) else 0)
        return NodeCosts(unary + priced, self.ends)

    def at(self, times: Integers) -> csr_array:
        """Bytes that each slot uses at these times, shape (times, slots)."""
        time, entry = np.nonzero(((self.low <= times[:, None]) & (times[:, None] < self.high))[:, self.owner])
        sizes = csr_array((self.bytes[entry], (time, self.slot[entry])), (len(times), int(self.ends[-1])))
        sizes.eliminate_zeros()
        return sizes

    def expected(self, weights: Floats) -> Floats:
        """Bytes at each time where choices have `weights`, a row as long as the last of `ends`."""
        size = np.bincount(self.owner, self.bytes * weights[self.slot], len(self.node))
        return self.over_time(size.astype(np.float64))

    def over_time(self, size: Floats) -> Floats:
        """Bytes at each time where the items have `size`."""
        times = len(self.base)
        change = np.bincount(self.low, size, times + 1) - np.bincount(self.high, size, times + 1)
        return np.asarray(self.base + np.cumsum(change)[:-1])


class _Edges:
    """All edges in one row: edge e is over (a[e], b[e]), its entries from first[e] on, `columns[e]` in a row."""

    def __init__(self, graph: PairGraph) -> None:
        distinct = {id(cost): cost for cost in graph.edges.values()}
        sizes = np.cumsum([0, *(cost.size for cost in distinct.values())])
        start = dict(zip(distinct, sizes.tolist(), strict=False))
        self.a, self.b = np.array(list(graph.edges), np.int64).reshape(-1, 2).T
        self.unary = np.concatenate(graph.unary) if graph.unary else np.zeros(0)
        self.first = np.array([start[id(cost)] for cost in graph.edges.values()], np.int64)
        self.columns = np.array([cost.shape[1] for cost in graph.edges.values()], np.int64)
        self.entries = np.concatenate([cost.reshape(-1) for cost in distinct.values()]) if distinct else np.zeros(0)


@dataclass(frozen=True, eq=False)
class Inner:
    """A graph with its memory."""

    graph: PairGraph
    items: Items

    @cached_property
    def edges(self) -> _Edges:
        return _Edges(self.graph)

    def priced(self, multipliers: Floats) -> NodeCosts:
        """The costs of the choices with their bytes at `multipliers` (times,) added."""
        return self.items.priced(self.edges.unary, multipliers)

    def cost(self, choice: Integers) -> float:
        edges, ends = self.edges, self.items.ends
        begin = np.append(0, ends)[:-1]
        place = edges.first + choice[edges.a] * edges.columns + choice[edges.b]
        return self.graph.constant + float(edges.unary[begin + choice].sum()) + float(edges.entries[place].sum())

    def fits(self, choice: Integers) -> bool:
        return bool(self.items.alive(choice).max(initial=0.0) <= self.items.capacity)


@dataclass(frozen=True, eq=False)
class Section:
    """Some nodes of an inner problem, the others fixed: `inner` over `nodes`, with the choices `kept` of each."""

    inner: Inner
    nodes: Integers
    kept: tuple[Integers, ...]

    def inside(self, choice: Integers) -> Integers:
        """The choices of the nodes, numbered within `kept`."""
        return np.array([np.searchsorted(k, s) for k, s in zip(self.kept, choice[self.nodes], strict=True)], np.int64)

    def outside(self, choice: Integers, picked: Integers) -> Integers:
        """`choice` with what was picked for the nodes."""
        result = choice.copy()
        result[self.nodes] = [k[s] for k, s in zip(self.kept, picked.tolist(), strict=True)]
        return result


def section(
    whole: Inner, around: Sequence[Sequence[tuple[int, Floats]]], free: dict[int, Integers], choice: Integers
) -> Section:
    """The nodes of `free` over those of their choices; `choice` of all others. `around`: see `narrow_moves.py`."""
    nodes = sorted(free)
    place = {n: i for i, n in enumerate(nodes)}
    unary, edges = [], {}
    for n in nodes:
        costs = whole.graph.unary[n][free[n]]
        for other, cost in around[n]:
            if other not in place:
                costs = costs + cost[choice[other]][free[n]]
            elif n < other:
                edges[place[n], place[other]] = np.ascontiguousarray(cost.T[np.ix_(free[n], free[other])])
        unary.append(costs)
    some = np.array(nodes, np.int64)
    return Section(
        Inner(PairGraph(tuple(unary), edges), _part(whole, some, free, choice)), some, tuple(free[n] for n in nodes)
    )


def _part(whole: Inner, nodes: Integers, free: dict[int, Integers], choice: Integers) -> Items:
    items = whole.items
    place = np.full(len(whole.graph.unary), -1)
    place[nodes] = np.arange(len(nodes))
    mine = np.flatnonzero(place[items.node] >= 0)
    others = np.where(place[items.node] < 0, items.bytes[items.first + choice[items.node]], 0.0)
    columns = np.stack([items.node, items.low, items.high, items.first])[:, mine]
    entries = [(int(place[n]), low, high, items.bytes[first + free[n]]) for n, low, high, first in columns.T.tolist()]
    ends = np.cumsum([len(free[n]) for n in nodes.tolist()]).astype(np.int64)
    return Items(entries, items.over_time(others), items.capacity, ends)


@dataclass(frozen=True, eq=False)
class Core(Inner):
    """`way`: from the choices of `graph` to those of `problem`."""

    way: Contracted
    problem: Problem

    def fits(self, choice: Integers) -> bool:
        """What fits the problem fits here, and nothing else: a plan that is left out is taken for none."""
        capacity = self.items.capacity
        room = capacity - float(self.items.alive(choice).max(initial=0.0))
        if math.isinf(capacity) or abs(room) > _ROUNDING * capacity:
            return room > 0
        return bool(memory(self.problem, self.lifted(choice)).max(initial=0.0) <= self.problem.capacity_bytes)

    def lifted(self, choice: Integers) -> tuple[int, ...]:
        return self.way.lifted(choice.tolist())


def core(problem: Problem) -> Core:
    """Of a problem whose values have one reader each, and no bytes. Raises InfeasibleError where a node has no allowed
    choice."""
    known: dict[tuple[object, ...], Floats] = {}
    pairs = [(value.producer, *value.consumers) for value in problem.values]
    try:
        costs = [_matrix(value, known) for value in problem.values]
        contraction = contracted([node.seconds for node in problem.nodes], pairs, costs)
    except NodeWithoutChoice as error:
        name = problem.nodes[error.node].name
        raise InfeasibleError(f"{name}: none of its choices is allowed together with the rest") from None
    return Core(contraction.graph, _items(problem, contraction), contraction, problem)


def _matrix(value: Value, known: dict[tuple[object, ...], Floats]) -> Floats:
    """Seconds for every choice of the producer and of the reader; equal ones are one object."""
    (target,) = value.targets
    key = (id(value.seconds), value.source.tobytes(), target.tobytes())
    if key not in known:
        assert not value.bytes.any(), f"{value.name} has bytes of its own"
        known[key] = np.ascontiguousarray(value.seconds[value.source][:, target])
    return known[key]


def _items(problem: Problem, contraction: Contracted) -> Items:
    spans, times = _condensed(np.array([node.interval for node in problem.nodes], np.int64).reshape(-1, 2))
    change = np.zeros(times + 1)
    joined: dict[tuple[int, int, int], Floats] = {}  # items of one node over one span are one
    for (low, high), node, owner, of in zip(
        spans.tolist(), problem.nodes, contraction.owner.tolist(), contraction.maps, strict=True
    ):
        if low >= high:
            continue
        size = node.bytes[of]
        least = float(size.min())
        if least:
            change[low] += least
            change[high] -= least
        if owner >= 0 and float(size.max()) > least:
            key = (owner, low, high)
            joined[key] = joined.get(key, 0.0) + (size - least)
    ends = np.cumsum([len(costs) for costs in contraction.graph.unary]).astype(np.int64)
    items = [(*key, size) for key, size in sorted(joined.items(), key=lambda pair: pair[0])]
    return Items(items, np.cumsum(change)[:-1], problem.capacity_bytes, ends)


def _condensed(spans: Integers) -> tuple[Integers, int]:
    """The spans over the times where a peak can be (just before a stop that follows a start), and their number."""
    real = spans[spans[:, 0] < spans[:, 1]]
    starts, stops = np.unique(real[:, 0]), np.unique(real[:, 1])
    before = np.searchsorted(starts, stops)
    times = stops[np.diff(before, prepend=0) > 0] - 1
    moved = np.searchsorted(times, spans)
    return np.where(spans[:, :1] < spans[:, 1:], moved, 0), len(times)
