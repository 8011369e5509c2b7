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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common import clock
from benchmarks.contest.core_problem import NodeChoices, NodeCosts
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
        self.sizes = [len(costs) for costs in graph.unary]
        self.costs = {n: {o: cost.T for o, cost in pairs} for n, pairs in enumerate(self.around)}
        self.orders: list[NarrowOrder] = []

    def changes(self, unary: NodeCosts, choice: Integers, rng: np.random.Generator) -> list[Move]:
        """The best choices of the free nodes of an order, where they are better; the best component first."""
        return _Elimination(self.costs, self._order(rng), unary, choice.tolist()).moves()

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
        free = {n for n, around in self.costs.items() if around and sizes[n] > 1}
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
        moves = _Elimination(costs, order, node_costs, now).moves()
        return [Move(m.gain, m.nodes, [int(each[n][s]) for n, s in zip(*m[1:], strict=True)]) for m in moves]

    def _order(self, rng: np.random.Generator) -> NarrowOrder:
        """A new one, or one of those remembered."""
        if len(self.orders) >= _ORDERS and rng.random() >= _ANEW:
            return self.orders[int(rng.integers(len(self.orders)))]
        nodes, freed = [n for n, around in self.costs.items() if around], list[int]()
        if nodes and rng.random() < _FREEING:
            weight = np.log1p([len(self.costs[n]) for n in nodes])
            count = min(len(nodes), int(rng.integers(1, _FREED + 1)))
            freed = rng.choice(nodes, count, replace=False, p=weight / weight.sum()).tolist()
        entries, noise = float(rng.choice(_ENTRIES)), float(rng.choice(_NOISE))
        order = narrow_order({n: self.costs[n] for n in nodes}, self.sizes, entries, noise, rng, freed)
        order.order.extend((n, ()) for n, around in self.costs.items() if not around)
        self.orders = [*self.orders[1 - _ORDERS :], order]
        return order


class _Elimination:
    """The free nodes of an order, of costs `unary`, while the others have the choices `now`."""

    def __init__(
        self,
        costs: dict[int, dict[int, Floats]],
        order: NarrowOrder,
        unary: NodeCosts | dict[int, Floats],
        now: list[int],
    ) -> None:
        self.costs, self.way, self.now = costs, order, now
        self.own = {}
        for n, _ in order.order:
            beside = (cost[:, now[o]] for o, cost in costs[n].items() if o in order.held)
            self.own[n] = sum(beside, start=unary[n])
        self.place = {n: i for i, (n, _) in enumerate(order.order)}
        self.used: list[list[_Factor]] = []  # of each node of the order: what it went with, messages to it too
        self.least: dict[int, float] = {}  # of the last node of each component: the least cost of all of it

    def moves(self) -> list[Move]:
        """One for each component that gets better, the best first."""
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
                pieces = self.pieces(moved, picked) if math.isfinite(old) else [(new - old, moved)]
                moves += [Move(gain, piece, [picked[n] for n in piece]) for gain, piece in pieces]
        return sorted(moves, key=lambda move: move.gain)

    def pieces(self, moved: list[int], picked: dict[int, int]) -> Iterator[tuple[float, list[int]]]:
        """Gains and nodes that change and are not connected by others that do: each is a proposal by itself."""
        left = set(moved)
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
            yield gain, piece

    def run(self) -> None:
        """Node after node, each a table over those that it leaves; the table goes on to the first of them to go."""
        waiting: list[list[_Factor]] = [[] for _ in self.way.order]
        for i, (n, others) in enumerate(self.way.order):
            clock.check()
            mine = [*waiting[i], *(_Factor((o,), c) for o, c in self.costs[n].items() if self.place.get(o, -1) > i)]
            self.used.append(mine)
            total = self.own[n].reshape((-1,) + (1,) * len(others))
            for factor in mine:  # its others are in the order of `others`, too
                total = total + factor.table[:, *(slice(None) if o in factor.others else None for o in others)]
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
