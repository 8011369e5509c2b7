"""Large moves on a core: a random forest of its nodes is chosen anew, exactly, while the others keep their choices.

A forest holds more than half of the nodes of a strategy graph, and min-plus over it takes microseconds a node. Every
tree is a proposal by itself, so that a memory limit can take some and leave others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common import clock
from autoshard.solvers.contraction.isolated_nodes import Lonely
from autoshard.solvers.contraction.node_costs import NodeCosts
from autoshard.solvers.contraction.presolve import PairGraph


class TreeMove(NamedTuple):
    """`nodes` take `choices`: the priced cost falls by -gain (gain < 0)."""

    gain: float
    nodes: list[int]
    choices: list[int]


class Forests:
    """`around[n]`: (neighbour, cost (its choices, choices of n)) of every edge of n."""

    def __init__(self, graph: PairGraph) -> None:
        self.around: list[list[tuple[int, Floats]]] = [[] for _ in graph.unary]
        flips: dict[int, Floats] = {}
        for (a, b), cost in graph.edges.items():
            if id(cost) not in flips:
                flips[id(cost)] = np.ascontiguousarray(cost.T)
            self.around[a].append((b, flips[id(cost)]))
            self.around[b].append((a, cost))
        self.joined = np.array([n for n, others in enumerate(self.around) if others], np.int64)
        alone = [n for n, others in enumerate(self.around) if not others]
        self.lonely = Lonely(alone, [len(own) for own in graph.unary])

    def changes(
        self, unary: NodeCosts, choice: Integers, rng: np.random.Generator, most: int | None = None
    ) -> list[TreeMove]:
        """The best choices of a random forest with trees of at most `most` nodes, where they are better; best first."""
        order = rng.permutation(self.joined).tolist()
        inside = self._forest(order, most or len(order))
        now = choice.tolist()
        seen = [False] * len(self.around)
        found = [TreeMove(-more, [n], [best]) for n, best, more in self.lonely.excess(unary, choice)]
        for root in order:
            if inside[root] and not seen[root]:
                clock.check()
                change = self._tree(unary, now, root, inside, seen)
                if change is not None:
                    found.append(change)
        return sorted(found, key=lambda change: change.gain)

    def _forest(self, order: list[int], most: int) -> list[bool]:
        """Adds nodes in order as long as no cycle closes."""
        root = list(range(len(self.around)))
        size = [0] * len(self.around)  # 0: not inside

        def find(n: int) -> int:
            while root[n] != n:
                root[n] = root[root[n]]
                n = root[n]
            return n

        inside = [False] * len(self.around)
        for n in order:
            joined: list[int] = []
            total = 1
            for other, _ in self.around[n]:
                if inside[other]:
                    top = find(other)
                    total += size[top]
                    if top in joined or total > most:
                        break
                    joined.append(top)
            else:
                inside[n], size[n] = True, total
                for top in joined:
                    root[top] = n
        return inside

    def _tree(
        self, unary: NodeCosts, now: list[int], root: int, inside: list[bool], seen: list[bool]
    ) -> TreeMove | None:
        order, above = self._breadth_first(root, inside, seen)
        costs: dict[int, Floats] = {}
        before = 0.0
        for n in order:
            own = unary[n].copy()
            for other, cost in self.around[n]:
                if not inside[other]:
                    own += cost[now[other]]
            costs[n] = own
            before += own[now[n]]
            parent, cost = above[n]
            if parent >= 0:
                before += cost[now[n], now[parent]]
        best: dict[int, Integers] = {}
        for n in reversed(order[1:]):
            parent, cost = above[n]
            total = cost + costs[n][:, None]
            best[n] = total.argmin(axis=0)
            costs[parent] += total.min(axis=0)
        pick = int(costs[root].argmin())
        after = float(costs[root][pick])
        if math.isinf(after) or (math.isfinite(before) and after >= before - 1e-12 * abs(before)):
            return None
        picked = {root: pick}
        for n in order[1:]:
            picked[n] = int(best[n][picked[above[n][0]]])
        moved = [n for n in order if picked[n] != now[n]]
        return TreeMove(after - float(before), moved, [picked[n] for n in moved]) if moved else None

    def _breadth_first(
        self, root: int, inside: list[bool], seen: list[bool]
    ) -> tuple[list[int], dict[int, tuple[int, Floats]]]:
        """Nodes from the root down; above[n]: the parent and the cost (choices of n, choices of the parent)."""
        order, above = [root], {root: (-1, np.zeros(0))}
        seen[root] = True
        for n in order:
            for other, cost in self.around[n]:
                if inside[other] and not seen[other]:
                    seen[other] = True
                    above[other] = (n, cost)
                    order.append(other)
        return order, above
