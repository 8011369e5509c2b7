"""Contraction: a large pairwise problem becomes a small one with the same plans, before any search.

In strategy graphs of real networks most pairs of choices are forbidden. Three exact steps, to a fixed point:

1. A choice without an allowed partner over some edge goes (arc consistency).
2. A node with one choice left goes; its edges become costs of its neighbours.
3. A node whose choice follows from a neighbour's (over an edge that allows one partner only) becomes part of that one.

Equal matrices are numbered once, and what is done to one is remembered: repeated layers cost a look-up.
Nodes of few edges are contracted first, so that the edges of a hub are not moved again and again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common import clock
from autoshard.solvers.elimination.cost_tables import digest

_DEGREES = (4, 32, 1 << 60, 1 << 60)  # of the nodes that may be contracted, pass by pass


@dataclass(frozen=True, eq=False)
class PairGraph:
    """Pairwise: `unary[n]` (choices,), `edges[a, b]` (choices of a, choices of b) with a < b, inf: forbidden."""

    unary: tuple[Floats, ...]
    edges: dict[tuple[int, int], Floats]
    constant: float = 0.0


@dataclass(frozen=True, eq=False)
class Contracted:
    """`graph` over the nodes that are left. Original node n has choice `maps[n][choice of owner[n]]`.

    `owner[n]`: -1 where one choice was left: then `maps[n]` has one entry.
    """

    graph: PairGraph
    owner: Integers
    maps: tuple[Integers, ...]

    def lifted(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice of every original node."""
        return tuple(int(m[choice[o] if o >= 0 else 0]) for m, o in zip(self.maps, self.owner.tolist(), strict=True))


class _Step(NamedTuple):
    """Node `node` has choice `of[choice of into]`; `into` is itself where choices went, -1 where of[0] was left."""

    node: int
    into: int
    of: Integers


class NodeWithoutChoice(Exception):
    """`node` has no choice that is allowed together with the rest. Never seen by a user: its name is told."""

    def __init__(self, node: int) -> None:
        super().__init__(node)
        self.node = node


class Matrices:
    """Append-only, by number: equal ones are stored once, and every operation on one is done once. Rows are the choices
    of one node, columns those of another; inf: forbidden."""

    def __init__(self) -> None:
        self.arrays: list[Floats] = []
        self._known: dict[object, Any] = {}

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def number(self, array: Floats) -> int:
        number = self._once(digest(array), lambda: len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(np.ascontiguousarray(array))
        return number

    def given(self, array: Floats) -> int:
        """The number of an array that its owner keeps alive and unchanged, known by its address."""
        return self._once(id(array), lambda: self.number(array))

    def flip(self, matrix: int) -> int:
        """Its transpose."""
        flipped = self._once(("flip", matrix), lambda: self.number(self.arrays[matrix].T))
        self._known.setdefault(("flip", flipped), matrix)
        return flipped

    def sum(self, a: int, b: int) -> int:
        return self._once(("sum", min(a, b), max(a, b)), lambda: self.number(self.arrays[a] + self.arrays[b]))

    def rows(self, matrix: int, which: Integers, key: bytes) -> int:
        """Its rows `which`, in that order; `key` is which.tobytes()."""
        return self._once((matrix, key), lambda: self.number(self.arrays[matrix][which]))

    def partner(self, matrix: int) -> NDArray[np.bool_] | None:
        """Which rows have a finite entry, as flags; None: all."""

        def flags() -> NDArray[np.bool_] | None:
            finite = np.atleast_1d(np.isfinite(self.arrays[matrix]).any(axis=1))
            return None if finite.all() else finite

        return self._once(("partner", matrix), flags)

    def decided(self, matrix: int) -> Integers | None:
        """The one allowed row of every column; None where a column allows another number than one."""

        def row() -> Integers | None:
            finite = np.isfinite(self.arrays[matrix])
            return finite.argmax(axis=0) if (finite.sum(axis=0) == 1).all() else None

        return self._once(("decided", matrix), row)

    def news(self, matrix: int) -> bool:
        """Whether the node of its rows has something to do: a row without partner, or rows that columns decide."""
        return self.partner(matrix) is not None or self.decided(matrix) is not None


def contracted(unary: Sequence[Floats], pairs: Sequence[tuple[int, int]], costs: Sequence[Floats]) -> Contracted:
    """Raises NodeWithoutChoice where none is left."""
    state = _Contraction(unary)
    for (a, b), cost in zip(pairs, costs, strict=True):
        state.connect(a, b, state.matrices.given(cost))
    return state.run()


class _Contraction:
    def __init__(self, unary: Sequence[Floats]) -> None:
        self.unary = list(unary)
        self.matrices = Matrices()
        self.edges: list[dict[int, int]] = [{} for _ in unary]
        self.alive = [True] * len(unary)
        self.steps: list[_Step] = []
        self.constant = 0.0
        self.waiting: OrderedDict[int, None] = OrderedDict()
        self.most = 0

    def connect(self, a: int, b: int, matrix: int) -> None:
        """Adds a matrix (choices of a, choices of b) to what is between them."""
        known = self.edges[a].get(b)
        total = matrix if known is None else self.matrices.sum(known, matrix)
        self.edges[a][b] = total
        self.edges[b][a] = self.matrices.flip(total)

    def run(self) -> Contracted:
        for self.most in _DEGREES:
            self.waiting = OrderedDict.fromkeys(np.flatnonzero(self.alive).tolist())
            self.settle()
        return self.finished()

    def settle(self) -> None:
        while self.waiting:
            clock.check()
            n, _ = self.waiting.popitem(last=False)
            if self.alive[n]:
                self.narrow(n)
                if len(self.unary[n]) == 1:
                    self.fix(n)
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
        self.steps.append(_Step(n, n, which))
        key = which.tobytes()
        for other, matrix in self.edges[n].items():
            new = self.matrices.rows(matrix, which, key)
            self.edges[n][other] = new
            self.edges[other][n] = self.matrices.flip(new)
            if self.matrices.news(self.matrices.flip(new)):
                self.waiting[other] = None

    def fix(self, n: int) -> None:
        self.constant += float(self.unary[n][0])
        for other, matrix in self.edges[n].items():
            self.unary[other] = self.unary[other] + self.matrices.arrays[matrix][0]
            del self.edges[other][n]
            self.waiting[other] = None
        self.gone(n, -1, np.zeros(1, np.int64))

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
        of, costs = self.matrices.decided(matrix), self.matrices.arrays[matrix]
        self.unary[other] = self.unary[other] + costs[of, np.arange(len(of))] + self.unary[n][of]
        key = of.tobytes()
        del self.edges[other][n]
        for third, edge in self.edges[n].items():
            if third != other:
                del self.edges[third][n]
                self.connect(other, third, self.matrices.rows(edge, of, key))
                if self.matrices.news(self.edges[third][other]):
                    self.waiting[third] = None
        self.gone(n, other, of)
        self.waiting[other] = None

    def gone(self, n: int, into: int, of: Integers) -> None:
        self.alive[n], self.edges[n] = False, {}
        self.steps.append(_Step(n, into, of))

    def finished(self) -> Contracted:
        left = [n for n, alive in enumerate(self.alive) if alive]
        number = {n: i for i, n in enumerate(left)}
        owner = np.full(len(self.alive), -1)
        maps: list[Integers] = [np.zeros(1, np.int64)] * len(self.alive)
        for n, i in number.items():
            owner[n], maps[n] = i, np.arange(len(self.unary[n]))
        for node, into, of in reversed(self.steps):
            owner[node], maps[node] = (owner[into], of[maps[into]]) if into >= 0 else (-1, of)
        edges = {
            (number[a], number[b]): self.matrices.arrays[matrix]
            for a in left
            for b, matrix in self.edges[a].items()
            if number[a] < number[b]
        }
        graph = PairGraph(tuple(self.unary[n] for n in left), edges, self.constant)
        return Contracted(graph, owner, tuple(maps))
