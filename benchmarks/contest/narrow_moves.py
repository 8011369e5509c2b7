"""Large moves on a core: all nodes but some hubs are chosen again, exactly, by elimination in small tables.

In strategy graphs of deep networks a few percent of the nodes, those that others read all over, are enough to leave
the rest narrow. Which are held changes from move to move, so that each is free in some; and where few choices of each
node are looked at, nearly none has to be held. Nodes go by the size of the table that they leave, the smallest first.
Where that is above the limit, the node of most edges among those left is held: it keeps its choice. Noise on what
counts as most makes every order another one. Every component of what is free is a proposal by itself, so that a memory
limit can take some and leave others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common import clock
from benchmarks.contest.node_rows import GivenCosts, NodeChoices, NodeCosts, first_least
from benchmarks.contest.presolve import PairGraph

_ENTRIES = (1e4, 1e5)  # of the largest table of a move
_NOISE = (0.2, 0.5, 1.0, 2.0)  # on the number of edges, where it is asked which node is held
_ORDERS = 8  # that are remembered
_ANEW = 0.25  # of the moves have a new order
_FREED, _FREEING = 5, 0.7  # nodes, at most, that an order holds last of all; of the orders, those with such nodes


class Move(NamedTuple):
    """`nodes` take `choices`: the priced cost falls by -gain (gain < 0)."""

    gain: float
    nodes: list[int]
    choices: list[int]


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


class _Factor(NamedTuple):
    """`table` over a node first, then over `others`."""

    others: tuple[int, ...]
    table: Floats


class NarrowMoves:
    """`around[n]`: (neighbour, cost (its choices, choices of n)) of every edge of n; `costs[n][o]`: (choices of n,
    choices of o)."""

    def __init__(self, graph: PairGraph) -> None:
        self.around: list[list[tuple[int, Floats]]] = [[] for _ in graph.unary]
        flips: dict[int, Floats] = {}
        for (a, b), cost in graph.edges.items():
            if id(cost) not in flips:
                flips[id(cost)] = np.ascontiguousarray(cost.T)
            self.around[a].append((b, flips[id(cost)]))
            self.around[b].append((a, cost))
        self.sizes = sizes = [len(costs) for costs in graph.unary]
        self.lonely = np.array([n for n, others in enumerate(self.around) if not others], np.int64)
        self.given = GivenCosts(self.around, sizes)
        self.costs = {n: {o: cost.T for o, cost in pairs} for n, pairs in enumerate(self.around) if pairs}
        self.orders: list[NarrowOrder] = []

    def changes(self, unary: NodeCosts, choice: Integers, rng: np.random.Generator) -> list[Move]:
        """The best choices of the free nodes of an order, where they are better; the best component first."""
        moves = self._alone(unary, choice)
        if self.costs:
            order = self._order(rng)
            held = np.zeros(len(self.sizes), bool)
            held[list(order.held)] = True
            node_costs = NodeCosts(unary.row + self.given.row(choice, held), unary.ends)
            moves += _Elimination(self.costs, order, node_costs, choice.tolist()).moves()
        return sorted(moves, key=lambda move: move.gain)

    def _alone(self, unary: NodeCosts, choice: Integers) -> list[Move]:
        """Of nodes without edges, those whose own costs make another choice better."""
        some, sizes = self.lonely, unary.sizes
        if not len(some):
            return []
        begin = unary.ends - sizes
        best = first_least(unary.row, begin, np.repeat(np.arange(len(sizes)), sizes))[some]
        more = unary.row[begin[some] + choice[some]] - unary.row[best]
        picked = best - begin[some]
        return [Move(-float(more[i]), [int(some[i])], [int(picked[i])]) for i in np.flatnonzero(more > 0).tolist()]

    def mixed(
        self,
        unary: NodeCosts,
        choice: Integers,
        pool: NodeChoices,
        rng: np.random.Generator,
        freed: Sequence[int] = (),
    ) -> list[Move]:
        """The same over the choices `pool` of each node, ascending, that of `choice` among them; `freed` are held last
        of all."""
        sizes, each = pool.sizes.tolist(), list(pool)
        free = {n for n in self.costs if sizes[n] > 1}
        now = [0] * len(each)
        node_costs, costs = dict[int, Floats](), dict[int, dict[int, Floats]]()
        for n in sorted(free):
            clock.check()
            some = each[n]
            total, costs[n] = unary[n][some], {}
            now[n] = int(some.searchsorted(choice[n]))
            for o, cost in self.costs[n].items():
                if o not in free:
                    total = total + cost[some, choice[o]]
                elif o in costs:
                    costs[n][o] = costs[o][n].T
                else:
                    costs[n][o] = cost[some[:, None], each[o]]
            node_costs[n] = total
        last = [n for n in freed if n in free]
        order = narrow_order(costs, sizes, _ENTRIES[-1], float(rng.choice(_NOISE)), rng, last)
        for n in free - order.held:
            for o in order.held & costs[n].keys():
                node_costs[n] = node_costs[n] + costs[n][o][:, now[o]]
        moves = _Elimination(costs, order, node_costs, now).moves()
        back = [Move(m.gain, m.nodes, [int(each[n][s]) for n, s in zip(*m[1:], strict=True)]) for m in moves]
        return sorted(back, key=lambda move: move.gain)

    def _order(self, rng: np.random.Generator) -> NarrowOrder:
        """A new one, or one of those remembered."""
        if len(self.orders) >= _ORDERS and rng.random() >= _ANEW:
            return self.orders[int(rng.integers(len(self.orders)))]
        nodes, freed = list(self.costs), list[int]()
        if rng.random() < _FREEING:
            weight = np.log1p([len(self.costs[n]) for n in nodes])
            count = min(len(nodes), int(rng.integers(1, _FREED + 1)))
            freed = rng.choice(nodes, count, replace=False, p=weight / weight.sum()).tolist()
        entries, noise = float(rng.choice(_ENTRIES)), float(rng.choice(_NOISE))
        order = narrow_order(self.costs, self.sizes, entries, noise, rng, freed)
        self.orders = [*self.orders[1 - _ORDERS :], order]
        return order


class _Elimination:
    """The free nodes of an order, while the others have the choices `now`, with which `unary` are the nodes' costs."""

    def __init__(
        self,
        costs: dict[int, dict[int, Floats]],
        order: NarrowOrder,
        unary: NodeCosts | dict[int, Floats],
        now: list[int],
    ) -> None:
        self.costs, self.way, self.now = costs, order, now
        self.own = {n: unary[n] for n, _ in order.order}
        self.place = {n: i for i, (n, _) in enumerate(order.order)}
        self.used: list[list[_Factor]] = []  # of each node of the order: what it went with, messages to it too
        self.least: dict[int, float] = {}  # of the last node of each component: the least cost of all of it

    def moves(self) -> list[Move]:
        """One for each component that gets better."""
        self.run()
        picked = self.picked()
        root: dict[int, int] = {}
        members: dict[int, list[int]] = {}
        before: dict[int, float] = {}
        for n, others in reversed(self.way.order):
            top = root[n] = root[others[0]] if others else n
            members.setdefault(top, []).append(n)
            edges = [cost[self.now[n], self.now[o]] for o, cost in self.costs[n].items() if o in root]
            before[top] = before.get(top, 0.0) + float(self.own[n][self.now[n]]) + float(sum(edges))
        moves = []
        for top, nodes in members.items():
            old, new = before[top], self.least[top]
            moved = [n for n in nodes if picked[n] != self.now[n]]
            better = math.isfinite(new) and not (math.isfinite(old) and new >= old - 1e-12 * abs(old))
            if moved and better:
                moves += self.pieces(moved, picked) if math.isfinite(old) else [self.move(new - old, moved, picked)]
        return moves

    def move(self, gain: float, nodes: list[int], picked: dict[int, int]) -> Move:
        return Move(gain, nodes, [picked[n] for n in nodes])

    def pieces(self, moved: list[int], picked: dict[int, int]) -> list[Move]:
        """Nodes that change and are not connected by others that do: each such piece is a proposal by itself."""
        left, moves = set(moved), []
        while left:
            piece = [left.pop()]
            gain = 0.0
            for n in piece:
                old, new, costs = self.now[n], picked[n], self.own[n]
                gain += float(costs[new] - costs[old])
                for o, cost in self.costs[n].items():
                    if o not in picked:
                        continue
                    change = float(cost[new, picked[o]] - cost[old, self.now[o]])
                    gain += change if picked[o] == self.now[o] else change / 2
                    if o in left:
                        left.remove(o)
                        piece.append(o)
            moves.append(self.move(gain, piece, picked))
        return moves

    def run(self) -> None:
        """Node after node, each a table over those that it leaves; the table goes on to the first of them to go."""
        waiting: list[list[_Factor]] = [[] for _ in self.way.order]
        for i, (n, others) in enumerate(self.way.order):
            clock.check()
            mine = [*waiting[i], *(_Factor((o,), c) for o, c in self.costs[n].items() if self.place.get(o, -1) > i)]
            self.used.append(mine)
            total = self.own[n].reshape((-1,) + (1,) * len(others))
            for factor in mine:
                if factor.others == others:
                    total = total + factor.table
                    continue
                shape = [len(self.own[n])] + [1] * len(others)
                for o, size in zip(factor.others, factor.table.shape[1:], strict=True):
                    shape[others.index(o) + 1] = size
                total = total + factor.table.reshape(shape)
            table = total.min(axis=0)
            if not others:
                self.least[n] = float(table)
                continue
            first = min(range(len(others)), key=lambda k: self.place[others[k]])
            before, after = range(first), range(first + 1, len(others))
            remaining = others[:first] + others[first + 1 :]
            waiting[self.place[others[first]]].append(_Factor(remaining, table.transpose(first, *before, *after)))

    def picked(self) -> dict[int, int]:
        """The choices of the least cost, those of `now` where they are as good."""
        picked: dict[int, int] = {}
        for (n, _), mine in zip(reversed(self.way.order), reversed(self.used), strict=True):
            total = self.own[n]
            for factor in mine:
                at: tuple[slice | int, ...] = (slice(None), *(picked[o] for o in factor.others))
                total = total + factor.table[at]
            best, now = int(total.argmin()), self.now[n]
            picked[n] = now if total[now] <= total[best] else best
        return picked
