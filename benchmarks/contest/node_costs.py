"""What the choices of many nodes cost, all in one row: for whole rows at once, or node by node."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autoshard.ir.problem import Floats, Integers


class NodeCosts:
    """`row`: the costs of all nodes' choices; those of node n end before `ends[n]`. `costs[n]`: node n's, a view."""

    def __init__(self, row: Floats, ends: Integers) -> None:
        self.row, self.ends = row, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, n: int) -> Floats:
        return self.row[self.ends[n - 1] if n else 0 : self.ends[n]]

    def __iter__(self) -> Iterator[Floats]:
        return iter(np.split(self.row, self.ends[:-1]) if len(self.ends) else [])

    def above_least(self) -> NodeCosts:
        """Each less the least of its node."""
        if not len(self.ends):
            return self
        begin = np.append(0, self.ends[:-1])
        return NodeCosts(
            self.row - np.repeat(np.minimum.reduceat(self.row, begin), np.diff(self.ends, prepend=0)), self.ends
        )


def first_least(costs: Floats, begin: Integers, node: Integers) -> Integers:
    """The place of the first least cost of each node, whose costs begin at `begin` (nodes,); `node` of each cost."""
    least = np.flatnonzero(costs == np.minimum.reduceat(costs, begin)[node])
    first = np.flatnonzero(np.diff(node[least], prepend=-1))
    assert len(first) == len(begin), "a node without a least cost"
    places: Integers = least[first]
    return places
