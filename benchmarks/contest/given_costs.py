"""What the choices of nodes cost beside those of neighbours that keep theirs, for all nodes at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats, Integers


class GivenCosts:
    """Nodes with `sizes` choices; `around[n]`: (neighbour, cost (its choices, choices of n)) of every edge of n."""

    def __init__(self, around: Sequence[Sequence[tuple[int, Floats]]], sizes: Sequence[int]) -> None:
        edges = [(n, other, cost) for n, own in enumerate(around) for other, cost in own]
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
        given = np.bincount(np.repeat(self.slot[of], width) + number, self.entries[place], self.count)
        return given.astype(np.float64, copy=False)  # without an edge numpy counts in whole numbers
