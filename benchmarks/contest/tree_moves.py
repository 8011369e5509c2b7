"""Large moves on a core: a random forest of its nodes is chosen anew, exactly, while the others keep their choices.

A forest holds more than half of the nodes of a strategy graph, and min-plus over it takes microseconds a node. Every
tree is a proposal by itself, so that a memory limit can take some and leave others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common import clock
from benchmarks.contest.given_costs import GivenCosts
from benchmarks.contest.isolated_nodes import Lonely
from benchmarks.contest.node_costs import NodeCosts
from benchmarks.contest.presolve import PairGraph

_FORESTS, _ANEW = 8, 0.3  # that are remembered for a size of trees; of the moves that make another


class TreeMove(NamedTuple):
    """`nodes` take `choices`: the priced cost falls by -gain (gain < 0)."""

    gain: float
    nodes: list[int]
    choices: list[int]


_Tree = list[tuple[int, int, Floats]]  # nodes from the root down, the parent, the cost (own choices, the parent's)


class _Forest(NamedTuple):
    held: NDArray[np.bool_]
    trees: list[_Tree]


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
        sizes = [len(own) for own in graph.unary]
        self.joined = np.array([n for n, others in enumerate(self.around) if others], np.int64)
        self.lonely = Lonely([n for n, others in enumerate(self.around) if not others], sizes)
        self.given = GivenCosts(self.around, sizes)
        self.known: dict[int, list[_Forest]] = {}

    def changes(
        self, unary: NodeCosts, choice: Integers, rng: np.random.Generator, most: int | None = None
    ) -> list[TreeMove]:
        """The best choices of a random forest with trees of at most `most` nodes, where they are better; best first."""
        forest = self._forest(rng, most or len(self.joined))
        costs = NodeCosts(unary.row + self.given.row(choice, forest.held), unary.ends)
        now = choice.tolist()
        found = [TreeMove(-more, [n], [best]) for n, best, more in self.lonely.excess(unary, choice)]
        for tree in forest.trees:
            clock.check()
            change = _best(tree, costs, now)
            if change is not None:
                found.append(change)
        return sorted(found, key=lambda change: change.gain)

    def _forest(self, rng: np.random.Generator, most: int) -> _Forest:
        """A new one, or one of those remembered."""
        known = self.known.setdefault(most, [])
        if len(known) >= _FORESTS and rng.random() >= _ANEW:
            return known[int(rng.integers(len(known)))]
        order = rng.permutation(self.joined).tolist()
        inside = self._inside(order, most)
        seen = [False] * len(self.around)
        trees = [self._tree(root, inside, seen) for root in order if inside[root] and not seen[root]]
        self.known[most] = [*known[1 - _FORESTS :], made := _Forest(~np.array(inside, bool), trees)]
        return made

    def _inside(self, order: list[int], most: int) -> list[bool]:
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

    def _tree(self, root: int, inside: list[bool], seen: list[bool]) -> _Tree:
        """Breadth first."""
        clock.check()
        tree: _Tree = [(root, -1, np.zeros(0))]
        seen[root] = True
        for n, _, _ in tree:
            for other, cost in self.around[n]:
                if inside[other] and not seen[other]:
                    seen[other] = True
                    tree.append((other, n, cost))
        return tree


def _best(tree: _Tree, costs: NodeCosts, now: list[int]) -> TreeMove | None:
    """The best choices of a tree, where they are better; what `costs` has of its nodes is used up."""
    own = {n: costs[n] for n, _, _ in tree}
    before = 0.0
    for n, parent, cost in tree:
        before += own[n][now[n]]
        if parent >= 0:
            before += cost[now[n], now[parent]]
    best: dict[int, Integers] = {}
    for n, parent, cost in reversed(tree[1:]):
        total = cost + own[n][:, None]
        best[n] = total.argmin(axis=0)
        own[parent] += total.min(axis=0)
    root = tree[0][0]
    pick = int(own[root].argmin())
    after = float(own[root][pick])
    if math.isinf(after) or (math.isfinite(before) and after >= before - 1e-12 * abs(before)):
        return None
    picked = {root: pick}
    for n, parent, _ in tree[1:]:
        picked[n] = int(best[n][picked[parent]])
    moved = [n for n, _, _ in tree if picked[n] != now[n]]
    return TreeMove(after - float(before), moved, [picked[n] for n in moved]) if moved else None
