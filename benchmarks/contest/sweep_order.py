"""In which order messages sweep: few levels, so that many nodes send at once, and long ways within a sweep.

Any order of the nodes is a valid one. The levels of the given order, the longest path to each node, are cut into
stretches that go side by side; what a stretch tells the next reaches it a sweep later.
"""

from __future__ import annotations

import numpy as np

from autoshard.ir.problem import Integers

STRETCH = 64  # levels


def sweep_order(ends: Integers, count: int, stretch: int = STRETCH) -> Integers:
    """The level of each of `count` nodes, those without edges 0; no edge, `ends` (edges, 2), joins two of one level."""
    ascending = np.sort(ends, axis=1)
    depth = _levels(ascending, np.arange(count))
    return _levels(ascending, np.lexsort((np.arange(count), depth % stretch)))


def _levels(ends: Integers, order: Integers) -> Integers:
    """The longest path to each node, where edges lead along `order`."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    before: list[list[int]] = [[] for _ in range(len(order))]
    for a, b in ends.tolist():
        if place[a] < place[b]:
            before[b].append(a)
        else:
            before[a].append(b)
    level = [0] * len(order)
    for n in order.tolist():
        level[n] = max((level[m] + 1 for m in before[n]), default=0)
    return np.array(level, np.int64)
