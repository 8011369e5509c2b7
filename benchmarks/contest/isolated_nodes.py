"""Nodes without edges, all at once: in large problems they are many, and each is decided by its own costs alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.ir.problem import Integers
from benchmarks.contest.node_costs import NodeCosts, first_least


class Lonely:
    """`nodes`, of all those whose numbers of choices are `sizes`."""

    def __init__(self, nodes: Sequence[int], sizes: Sequence[int]) -> None:
        self.nodes = np.array(nodes, np.int64)
        size = np.array(sizes, np.int64)
        own = size[self.nodes]
        self.first = np.append(0, np.cumsum(own))[:-1]
        self.number = np.repeat(np.arange(len(self.nodes)), own)
        starts = np.append(0, np.cumsum(size))[:-1][self.nodes]
        self.slots = np.arange(own.sum()) + np.repeat(starts - self.first, own)

    def least(self, unary: NodeCosts) -> float:
        """The sum of their least costs."""
        return float(np.minimum.reduceat(unary.row[self.slots], self.first).sum()) if len(self.nodes) else 0.0

    def best(self, unary: NodeCosts) -> Integers:
        """The first cheapest choice of each."""
        costs = unary.row[self.slots]
        return first_least(costs, self.first, self.number) - self.first if len(self.nodes) else np.zeros(0, np.int64)

    def excess(self, unary: NodeCosts, choice: Integers) -> list[tuple[int, int, float]]:
        """(node, its best choice, what its own costs beyond that) of those that have a better one."""
        if not len(self.nodes):
            return []
        best, costs = self.best(unary), unary.row[self.slots]
        more = costs[self.first + choice[self.nodes]] - costs[self.first + best]
        return [(int(self.nodes[i]), int(best[i]), float(more[i])) for i in np.flatnonzero(more > 0).tolist()]
