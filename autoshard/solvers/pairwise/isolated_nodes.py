"""Nodes without edges, all at once: in large problems they are many, and each is decided by its own costs alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.ir.problem import Floats, Integers


class Lonely:
    """`nodes`, of all those whose numbers of choices are `sizes`."""

    def __init__(self, nodes: Sequence[int], sizes: Sequence[int]) -> None:
        self.nodes = list(nodes)
        ends = np.cumsum([sizes[n] for n in self.nodes], dtype=np.int64)
        self.first = np.append(0, ends)[:-1]

    def least(self, unary: Sequence[Floats]) -> float:
        """The sum of their least costs."""
        return float(self._least(unary)[0].sum()) if self.nodes else 0.0

    def excess(self, unary: Sequence[Floats], choice: Integers) -> list[tuple[int, float]]:
        """(node, what its choice costs beyond its best one) of those that have a better one."""
        if not self.nodes:
            return []
        least, costs = self._least(unary)
        more = costs[self.first + choice[self.nodes]] - least
        return [(self.nodes[i], float(more[i])) for i in np.flatnonzero(more > 0).tolist()]

    def _least(self, unary: Sequence[Floats]) -> tuple[Floats, Floats]:
        costs = np.concatenate([unary[n] for n in self.nodes])
        return np.asarray(np.minimum.reduceat(costs, self.first)), costs
