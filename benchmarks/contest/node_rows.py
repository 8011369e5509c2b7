"""What stands in one row for the choices of many nodes: costs, and choices that are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats, Integers

Kind = TypeVar("Kind", bound=np.generic)


class NodeRow(Generic[Kind]):
    """`row`: the entries of all nodes; those of node n end before `ends[n]`, and are `self[n]`, a view."""

    def __init__(self, row: NDArray[Kind], ends: Integers) -> None:
        self.row, self.ends = row, ends

    def __len__(self) -> int:
        return len(self.ends)

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
    places: Integers = least[first]
    return places


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


class GivenCosts:
    """What choices cost beside those of neighbours that keep theirs, of nodes with `sizes` choices. `around[n]`:
    (neighbour, cost (its choices, choices of n)) of every edge of n."""

    def __init__(self, around: Sequence[Sequence[tuple[int, Floats]]], sizes: Sequence[int]) -> None:
        edges = [(n, other, cost) for n, neighbours in enumerate(around) for other, cost in neighbours]
        tables = {id(cost): cost for _, _, cost in edges}
        ends = np.append(0, np.cumsum(np.array([cost.size for cost in tables.values()], np.int64)))
        begin = dict(zip(tables, ends.tolist(), strict=False))
        starts = np.append(0, np.cumsum(np.array(sizes, np.int64)))
        self.entries = np.concatenate([np.zeros(0), *(cost.reshape(-1) for cost in tables.values())])
        self.node, self.other = (np.array([edge[i] for edge in edges], np.int64) for i in (0, 1))
        self.first = np.array([begin[id(cost)] for *_, cost in edges], np.int64)
        self.width, self.slot = np.diff(starts)[self.node], starts[self.node]
        self.count = int(starts[-1])

    def row(self, choice: Integers, held: NDArray[np.bool_]) -> Floats:
        """Of all choices of all nodes, in one row: the sum over the edges to the nodes `held`; of those, 0."""
        of = np.flatnonzero(held[self.other] & ~held[self.node])
        width = self.width[of]
        number = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
        place = np.repeat(self.first[of] + choice[self.other[of]] * width, width) + number
        row = np.bincount(np.repeat(self.slot[of], width) + number, self.entries[place], self.count)
        return row.astype(np.float64, copy=False)  # without an edge numpy counts in whole numbers
