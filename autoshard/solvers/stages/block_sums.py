"""The least seconds of some blocks on one stage within its memory: sums of fronts, pruned as they are made.

Equal blocks can be exchanged, so a sum knows only how many of each kind there are. Exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.stages.counted_points import COUNTED, Sum, mixed, undominated

Counts = tuple[int, ...]  # blocks of each kind
_INF = float("inf")


_NOTHING = Sum(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))


class BlockSums:
    """Sums over the blocks of one stage. `seconds[kind]` and `bytes[kind]` are of the kind's points, `working[kind]`
    what one of them needs while it runs: the most over the blocks of the stage counts once. `dealt`: the kind that is
    distributed over chunks, and for each of these, ascending, by what bytes beyond those of the kind's leanest point
    are multiplied there."""

    def __init__(
        self,
        seconds: Sequence[Floats],
        sizes: Sequence[Floats],
        working: Sequence[Floats],
        capacity_bytes: float,
        dealt: tuple[int, Floats] | None = None,
    ) -> None:
        self.rooms: list[_Room] = []
        for top in sorted({float(w) for kind_bytes in working for w in kind_bytes}):
            room = _Room(seconds, sizes, working, top, capacity_bytes - top, dealt)
            if top <= capacity_bytes and not (self.rooms and self.rooms[-1].has_points_of(room)):
                self.rooms.append(room)

    def least(self, counts: Integers) -> Floats:
        """Seconds of each row of `counts`, by kind; infinite where nothing fits."""
        return self.least_and_room(counts)[0]

    def least_and_room(self, counts: Integers) -> tuple[Floats, Integers]:
        """The least seconds, and the room in which they are reached."""
        if not self.rooms:
            return np.full(len(counts), _INF), np.full(len(counts), -1)
        seconds = np.array([room.least(counts) for room in self.rooms])
        best = seconds.argmin(axis=0)
        return seconds[best, np.arange(len(counts))], best

    def points(self, counts: Integers, room: int) -> list[list[int]]:
        """Points of each kind's blocks in the least way, ascending. `counts` by kind, of what fits in the `room` from
        `least_and_room`."""
        return self.rooms[room].chosen(counts)


class _Room:
    """Sums of the points that work with at most `top` bytes, within what that leaves."""

    def __init__(
        self,
        seconds: Sequence[Floats],
        sizes: Sequence[Floats],
        working: Sequence[Floats],
        top: float,
        capacity: float,
        dealt: tuple[int, Floats] | None,
    ) -> None:
        self.capacity = capacity
        self.dealt, self.ratios = dealt or (-1, np.ones(1))
        self.points: list[Sum] = []
        for own_seconds, own_bytes, own_working in zip(seconds, sizes, working, strict=True):
            usable = np.flatnonzero((own_working <= top) & (own_bytes <= capacity))
            pareto = undominated(own_seconds[usable], own_bytes[usable])
            usable = usable[pareto]
            self.points.append(Sum(own_seconds[usable], own_bytes[usable], np.zeros(len(usable), np.int64), usable))
        self.known: dict[Counts, Sum] = {}
        self.sizes = np.array([points.size for points in self.points])
        self.several, self.none = np.flatnonzero(self.sizes > 1), np.flatnonzero(self.sizes == 0)
        self.one = np.flatnonzero(self.sizes == 1)
        self.one_seconds = np.array([self.points[kind].seconds[0] for kind in self.one])
        self.one_bytes = np.array([self.points[kind].bytes[0] for kind in self.one])

    def has_points_of(self, other: _Room) -> bool:
        """Then what the other one holds, this one does: it has more room."""
        pairs = zip(self.points, other.points, strict=True)
        return all(np.array_equal(points.point, its.point) for points, its in pairs)

    def least(self, counts: Integers) -> Floats:
        """Seconds of each row. One kind that has a choice, of few points, is counted out; others are added up."""
        sizes, several = self.sizes, self.several
        choosing = counts[:, several] > 0
        least = np.full(len(counts), _INF)
        possible = np.asarray(~(counts[:, self.none] > 0).any(axis=1))
        fixed = possible & ~choosing.any(axis=1)
        seconds, room = self._fixed(counts)
        least[fixed] = np.where(room[fixed] >= 0, seconds[fixed], _INF)
        for place, kind in enumerate(several):
            rows = np.flatnonzero(possible & choosing[:, place] & (choosing.sum(axis=1) == 1))
            if len(rows) and sizes[kind] <= COUNTED:
                least[rows] = seconds[rows] + self._mixed(kind, counts[rows, kind], room[rows])[0]
                possible[rows] = False
        for row in np.flatnonzero(possible & choosing.any(axis=1)):
            total = self.total(tuple(map(int, counts[row])))
            least[row] = total.seconds[-1] if total.size else _INF
        return least

    def _fixed(self, counts: Integers) -> tuple[Floats, Floats]:
        """(seconds, room that is left) of the blocks that have one point."""
        singles = counts[:, self.one]
        return singles @ self.one_seconds, self.capacity - singles @ self.one_bytes

    def chosen(self, counts: Integers) -> list[list[int]]:
        several = [kind for kind, points in enumerate(self.points) if points.size > 1 and counts[kind]]
        if len(several) > 1 or any(self.points[kind].size > COUNTED for kind in several):
            key = tuple(map(int, counts))
            return self.walk(key, self.total(key).size - 1)
        chosen = [[int(points.point[0])] * int(n) if n else [] for points, n in zip(self.points, counts, strict=True)]
        for kind in several:
            mix = self._mixed(kind, counts[[kind]], self._fixed(counts[None])[1])[1][0]
            chosen[kind] = sorted(np.repeat(self.points[kind].point, mix).tolist())
        return chosen

    def _mixed(self, kind: int | np.integer, blocks: Integers, room: Floats) -> tuple[Floats, Integers]:
        return mixed(self.points[kind], blocks, room, self.ratios if kind == self.dealt else np.ones(1))

    def total(self, counts: Counts) -> Sum:
        """The sum for `counts`: one block of its last kind is added to the sum of the others."""
        if counts not in self.known:
            missing: list[Counts] = []
            while counts not in self.known and any(counts):
                missing.append(counts)
                counts = _one_less(counts)[1]
            for later in reversed(missing):
                kind, before = _one_less(later)
                self.known[later] = self._added(self.known.get(before, _NOTHING), self.points[kind])
            counts = missing[0] if missing else counts
        return self.known.get(counts, _NOTHING)

    def _added(self, total: Sum, points: Sum) -> Sum:
        if points.size == 1:  # none becomes dominated
            sizes = total.bytes + points.bytes
            stop = int(np.searchsorted(sizes, self.capacity, side="right"))
            each = np.arange(stop)
            return Sum(total.seconds[:stop] + points.seconds, sizes[:stop], each, np.full(stop, points.point[0]))
        seconds = np.add.outer(total.seconds, points.seconds).ravel()
        sizes = np.add.outer(total.bytes, points.bytes).ravel()
        fitting = np.flatnonzero(sizes <= self.capacity)
        pareto = fitting[undominated(seconds[fitting], sizes[fitting])]
        return Sum(
            seconds[pareto], sizes[pareto], pareto // max(1, points.size), points.point[pareto % max(1, points.size)]
        )

    def walk(self, counts: Counts, entry: int) -> list[list[int]]:
        chosen: list[list[int]] = [[] for _ in counts]
        while any(counts):
            total = self.total(counts)
            kind, counts = _one_less(counts)
            chosen[kind].append(int(total.point[entry]))
            entry = int(total.before[entry])
        return [sorted(points) for points in chosen]


def _one_less(counts: Counts) -> tuple[int, Counts]:
    """The rarer kinds are added last: long sums of the others are shared."""
    kind = min((k for k, count in enumerate(counts) if count), key=lambda k: (counts[k], k))
    return kind, (*counts[:kind], counts[kind] - 1, *counts[kind + 1 :])
