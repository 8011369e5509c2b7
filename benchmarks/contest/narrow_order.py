"""Which nodes of a graph are held, so that the others can be eliminated in small tables, and in which order.

Nodes go by the size of the table that they leave, the smallest first. Where that is above the limit, the node of most
edges among those left is held: it keeps its choice. Noise on what counts as most makes every order another one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.solvers.common import clock


class NarrowOrder(NamedTuple):
    """`order`: each node with those that its table is over, all later in the order. `held`: the nodes left out."""

    order: list[tuple[int, tuple[int, ...]]]
    held: frozenset[int]


def narrow_order(
    around: Mapping[int, Iterable[int]],
    sizes: Sequence[int],
    entries: float,
    noise: float,
    rng: np.random.Generator,
    kept: Iterable[int] = (),
) -> NarrowOrder:
    """`entries`: of a table with its own node, at most. `kept`: nodes that are held last of all."""
    limit, logs = math.log(entries), [math.log(size) for size in sizes]
    left = {n: set(others) for n, others in around.items()}
    rank = dict(zip(left, (noise * rng.gumbel(size=len(left))).tolist(), strict=True))
    for n in kept:
        rank[n] = -math.inf
    most = sorted(left, key=lambda n: math.log1p(len(left[n])) + rank[n])
    now = {n: logs[n] + sum(logs[o] for o in others) for n, others in left.items()}
    heap = [(size, n) for n, size in now.items()]
    heapq.heapify(heap)

    def grow(n: int, by: float) -> None:
        now[n] += by
        heapq.heappush(heap, (now[n], n))

    order, held = [], set[int]()
    while heap:
        size, n = heapq.heappop(heap)
        if n not in left or now[n] != size:
            continue
        clock.check()
        if size > limit:
            while (hub := most.pop()) not in left:
                pass
            held.add(hub)
            for o in left.pop(hub):
                left[o].discard(hub)
                grow(o, -logs[hub])
            if n in left:
                grow(n, 0.0)
            continue
        others = left.pop(n)
        order.append((n, tuple(sorted(others))))
        for o in others:
            left[o].discard(n)
            new = others - left[o]
            new.discard(o)
            left[o] |= new
            grow(o, sum(logs[x] for x in new) - logs[n])
    return NarrowOrder([(n, tuple(o for o in others if o not in held)) for n, others in order], frozenset(held))
