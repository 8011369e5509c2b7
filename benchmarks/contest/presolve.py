"""Contraction: a large pairwise problem becomes a small one with the same plans, before any search.

In strategy graphs of real networks most pairs of choices are forbidden. Three exact steps, to a fixed point:

1. A choice without an allowed partner over some edge goes (arc consistency).
2. A node with one choice left goes; its edges become costs of its neighbours.
3. A node whose choice follows from a neighbour's (over an edge that allows one partner only) becomes part of that one.

Equal matrices are numbered once, and what is done to one is remembered: repeated layers cost a look-up.
Nodes of few edges are contracted first, so that the edges of a hub are not moved again and again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common import clock
from benchmarks.contest.matrix_store import Matrices

_DEGREES = (4, 32, 1 << 60)  # of the nodes that may be contracted, pass by pass


@dataclass(frozen=True, eq=False)
class PairGraph:
    """Pairwise: `unary[n]` (choices,), `edges[a, b]` (choices of a, choices of b) with a < b, inf: forbidden."""

    unary: tuple[Floats, ...]
    edges: dict[tuple[int, int], Floats]
    constant: float = 0.0


@dataclass(frozen=True, eq=False)
class Contracted:
    """`graph` over the nodes that are left. Original node n has choice `maps[n][choice of owner[n]]`.

    `owner[n]`: -1 where one choice was left: then `maps[n]` has one entry. `left`: the original node of each of the
    graph's.
    """

    graph: PairGraph
    owner: Integers
    maps: tuple[Integers, ...]
    left: Integers

    def lifted(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice of every original node."""
        return tuple(int(m[choice[o] if o >= 0 else 0]) for m, o in zip(self.maps, self.owner.tolist(), strict=True))

    def further(self, then: Contracted) -> Contracted:
        """With `then`, the contraction of `graph`, done after this one."""
        owner = self.owner.copy()
        owner[owner >= 0] = then.owner[owner[owner >= 0]]
        maps = tuple(of if o < 0 else of[then.maps[o]] for of, o in zip(self.maps, self.owner.tolist(), strict=True))
        graph = PairGraph(then.graph.unary, then.graph.edges, self.graph.constant + then.graph.constant)
        return Contracted(graph, owner, maps, self.left[then.left])


class _Merge(NamedTuple):
    """Node `gone` has choice `of[choice of into]`; `into` -1: it is fixed to of[0]."""

    gone: int
    into: int
    of: Integers


class _Keep(NamedTuple):
    """Of the choices of `node`, `which` stay."""

    node: int
    which: Integers


class NodeWithoutChoice(Exception):
    """`node` has no choice that is allowed together with the rest. Never seen by a user: its name is told."""

    def __init__(self, node: int) -> None:
        super().__init__(node)
        self.node = node


def contracted(
    unary: Sequence[Floats],
    pairs: Sequence[tuple[int, int]],
    costs: Sequence[Floats],
    free: Sequence[bool] | None = None,
) -> Contracted:
    """`free`: whether nothing but costs depends on a node's choice. Raises NodeWithoutChoice where none is left."""
    state = _Contraction(unary, [False] * len(unary) if free is None else free)
    for (a, b), cost in zip(pairs, costs, strict=True):
        state.connect(a, b, state.matrices.given(cost))
    return state.run()


class _Contraction:
    def __init__(self, unary: Sequence[Floats], free: Sequence[bool]) -> None:
        self.unary, self.free = list(unary), list(free)
        self.matrices = Matrices()
        self.edges: list[dict[int, int]] = [{} for _ in unary]
        self.alive = [True] * len(unary)
        self.events: list[_Merge | _Keep] = []
        self.constant = 0.0
        self.waiting: deque[int] = deque()
        self.queued = [False] * len(unary)
        self.most = 0

    def connect(self, a: int, b: int, matrix: int) -> None:
        """Adds a matrix (choices of a, choices of b) to what is between them."""
        known = self.edges[a].get(b)
        total = matrix if known is None else self.matrices.sum(known, matrix)
        self.edges[a][b] = total
        self.edges[b][a] = self.matrices.flip(total)

    def run(self) -> Contracted:
        for n in range(len(self.unary)):
            self.push(n)
        for most in _DEGREES:
            self.most = most
            self.settle()
            for n, alive in enumerate(self.alive):
                if alive:
                    self.push(n)
        self.settle()
        return self.finished()

    def push(self, n: int) -> None:
        if not self.queued[n]:
            self.queued[n] = True
            self.waiting.append(n)

    def settle(self) -> None:
        while self.waiting:
            clock.check()
            n = self.waiting.popleft()
            self.queued[n] = False
            if self.alive[n]:
                self.visit(n)

    def visit(self, n: int) -> None:
        self.narrow(n)
        if len(self.unary[n]) == 1 or (self.free[n] and not self.edges[n]):
            self.fix(n)
        elif self.free[n] and len(self.edges[n]) == 1:
            self.fold(n)
        elif len(self.edges[n]) <= self.most:
            self.follow(n)

    def narrow(self, n: int) -> None:
        """Drops the choices of n that are forbidden, or have no partner over some edge."""
        allowed = np.isfinite(self.unary[n])
        for matrix in set(self.edges[n].values()):
            partner = self.matrices.partner(matrix)
            if partner is not None:
                allowed &= partner
        if allowed.all():
            return
        which = np.flatnonzero(allowed)
        if not len(which):
            raise NodeWithoutChoice(n)
        self.unary[n] = self.unary[n][which]
        self.events.append(_Keep(n, which))
        key = which.tobytes()
        for other, matrix in self.edges[n].items():
            new = self.matrices.rows(matrix, which, key)
            self.edges[n][other] = new
            self.edges[other][n] = self.matrices.flip(new)
            if self.matrices.news(self.matrices.flip(new)):
                self.push(other)

    def fix(self, n: int) -> None:
        best = int(self.unary[n].argmin())  # the only one, or nothing else depends on it
        self.constant += float(self.unary[n][best])
        for other, matrix in self.edges[n].items():
            self.unary[other] = self.unary[other] + self.matrices.arrays[matrix][0]
            del self.edges[other][n]
            self.push(other)
        self.edges[n] = {}
        self.gone(n, -1, np.array([best]))

    def fold(self, n: int) -> None:
        """n has one neighbour, and for each choice of that takes its cheapest."""
        ((other, matrix),) = self.edges[n].items()
        total = self.unary[n][:, None] + self.matrices.arrays[matrix]
        self.unary[other] = self.unary[other] + total.min(axis=0)
        del self.edges[other][n]
        self.edges[n] = {}
        self.gone(n, other, total.argmin(axis=0))
        self.push(other)

    def follow(self, n: int) -> None:
        """Contracts n into a neighbour that decides it, the one with the fewest choices, then edges."""
        deciding = [
            (len(self.unary[other]), len(self.edges[other]), other, matrix)
            for other, matrix in self.edges[n].items()
            if self.matrices.decided(matrix) is not None
        ]
        if not deciding:
            return
        *_, other, matrix = min(deciding)
        of = self.matrices.decided(matrix)
        assert of is not None
        own = self.matrices.arrays[matrix]
        self.unary[other] = self.unary[other] + own[of, np.arange(len(of))] + self.unary[n][of]
        key = of.tobytes()
        del self.edges[other][n]
        for third, edge in self.edges[n].items():
            if third != other:
                del self.edges[third][n]
                self.connect(other, third, self.matrices.rows(edge, of, key))
                if self.matrices.news(self.edges[third][other]):
                    self.push(third)
        self.edges[n] = {}
        self.free[other] = self.free[other] and self.free[n]
        self.gone(n, other, of)
        self.push(other)

    def gone(self, n: int, into: int, of: Integers) -> None:
        self.alive[n] = False
        self.events.append(_Merge(n, into, of))

    def finished(self) -> Contracted:
        left = [n for n, alive in enumerate(self.alive) if alive]
        number = {n: i for i, n in enumerate(left)}
        owner = np.full(len(self.alive), -1)
        maps: list[Integers] = [np.zeros(1, np.int64)] * len(self.alive)
        for n, i in number.items():
            owner[n], maps[n] = i, np.arange(len(self.unary[n]))
        for event in reversed(self.events):
            if isinstance(event, _Keep):
                maps[event.node] = event.which[maps[event.node]]
            elif event.into < 0:
                maps[event.gone] = event.of
            else:
                owner[event.gone], maps[event.gone] = owner[event.into], event.of[maps[event.into]]
        edges = {
            (number[a], number[b]): self.matrices.arrays[matrix]
            for a in left
            for b, matrix in self.edges[a].items()
            if number[a] < number[b]
        }
        graph = PairGraph(tuple(self.unary[n] for n in left), edges, self.constant)
        return Contracted(graph, owner, tuple(maps), np.array(left, np.int64))
