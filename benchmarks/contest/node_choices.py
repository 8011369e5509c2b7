"""Some of the choices of many nodes, all in one row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autoshard.ir.problem import Integers
from benchmarks.contest.node_costs import NodeCosts


class NodeChoices:
    """`row`: of each node its choices that are looked at, ascending; those of node n end before `ends[n]`."""

    def __init__(self, row: Integers, ends: Integers) -> None:
        self.row, self.ends = row, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, n: int) -> Integers:
        return self.row[self.ends[n - 1] if n else 0 : self.ends[n]]

    def __iter__(self) -> Iterator[Integers]:
        return iter(np.split(self.row, self.ends[:-1]) if len(self.ends) else [])

    @property
    def sizes(self) -> Integers:
        return np.diff(self.ends, prepend=0)


def cheapest(costs: NodeCosts, width: int, choice: Integers | None = None) -> NodeChoices:
    """Of each node the `width` cheapest, the first of equals, and that of `choice`."""
    sizes = np.diff(costs.ends, prepend=0)
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
