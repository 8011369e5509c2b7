"""The least seconds of some blocks on one stage within its memory: sums of fronts, pruned as they are made.

Equal blocks can be exchanged, so a sum knows only how many of each kind there are. Exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.stages.stage_problem import Front

Counts = tuple[int, ...]  # blocks of each kind
_INF = float("inf")


@dataclass(frozen=True, eq=False)
class Sum:
    """Undominated totals, bytes ascending, seconds descending; `parents`: (entry of the sum before, point added)."""

    seconds: Floats
    bytes: Floats
    before: Integers
    point: Integers

    @cached_property
    def size(self) -> int:
        return len(self.seconds)


_NOTHING = Sum(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))


class BlockSums:
    """Of one stage. `seconds[kind]` and `bytes[kind]` are of the kind's points, `working[kind]` what one of them needs
    while it runs: the most over the blocks of the stage counts once."""

    def __init__(
        self, seconds: Sequence[Floats], sizes: Sequence[Floats], working: Sequence[Floats], capacity_bytes: float
    ) -> None:
        self.rooms = [
            _Room(seconds, sizes, working, top, capacity_bytes - top)
            for top in sorted({float(w) for own in working for w in own})
            if top <= capacity_bytes
        ]
        self.known: dict[Counts, tuple[float, int, int]] = {}

    def least(self, counts: Counts) -> float:
        """Seconds, infinite where nothing fits."""
        return self._found(counts)[0]

    def points(self, counts: Counts) -> list[list[int]]:
        """Of each kind, the points of its blocks in the least way, ascending."""
        _, room, entry = self._found(counts)
        return self.rooms[room].walk(counts, entry)

    def _found(self, counts: Counts) -> tuple[float, int, int]:
        if counts not in self.known:
            best = (_INF, -1, -1)
            for number, room in enumerate(self.rooms):
                total = room.total(counts)
                if total.size and total.seconds[-1] < best[0]:
                    best = (float(total.seconds[-1]), number, total.size - 1)
            self.known[counts] = best
        return self.known[counts]


class _Room:
    """Sums of the points that work with at most `top` bytes, within what that leaves."""

    def __init__(
        self, seconds: Sequence[Floats], sizes: Sequence[Floats], working: Sequence[Floats], top: float, capacity: float
    ) -> None:
        self.capacity = capacity
        self.points: list[Sum] = []
        for own_seconds, own_bytes, own_working in zip(seconds, sizes, working, strict=True):
            usable = np.flatnonzero((own_working <= top) & (own_bytes <= capacity))
            kept = _undominated(own_seconds[usable], own_bytes[usable])
            usable = usable[kept]
            self.points.append(Sum(own_seconds[usable], own_bytes[usable], np.zeros(len(usable), np.int64), usable))
        self.known: dict[Counts, Sum] = {}

    def total(self, counts: Counts) -> Sum:
        """Of the last kind that counts has, one block is added to the sum of the others."""
        if counts not in self.known:
            made: list[Counts] = []
            while counts not in self.known and any(counts):
                made.append(counts)
                counts = _one_less(counts)[1]
            for later in reversed(made):
                kind, before = _one_less(later)
                self.known[later] = self._added(self.known.get(before, _NOTHING), self.points[kind])
            counts = made[0] if made else counts
        return self.known.get(counts, _NOTHING)

    def _added(self, own: Sum, points: Sum) -> Sum:
        seconds = np.add.outer(own.seconds, points.seconds).ravel()
        sizes = np.add.outer(own.bytes, points.bytes).ravel()
        fitting = np.flatnonzero(sizes <= self.capacity)
        kept = fitting[_undominated(seconds[fitting], sizes[fitting])]
        return Sum(seconds[kept], sizes[kept], kept // max(1, points.size), points.point[kept % max(1, points.size)])

    def walk(self, counts: Counts, entry: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in counts]
        while any(counts):
            own = self.total(counts)
            kind, counts = _one_less(counts)
            found[kind].append(int(own.point[entry]))
            entry = int(own.before[entry])
        return [sorted(points) for points in found]


def _one_less(counts: Counts) -> tuple[int, Counts]:
    """The rarer kinds are added last: long sums of the others are shared."""
    kind = min((k for k, count in enumerate(counts) if count), key=lambda k: (counts[k], k))
    return kind, (*counts[:kind], counts[kind] - 1, *counts[kind + 1 :])


def _undominated(seconds: Floats, sizes: Floats) -> Integers:
    """Entries that none is as small as in both, bytes ascending."""
    order = np.lexsort((seconds, sizes))
    ordered = seconds[order]
    least = np.concatenate([[_INF], np.minimum.accumulate(ordered)[:-1]]) if len(ordered) else ordered
    kept: Integers = order[ordered < least]
    return kept


def point_bytes(front: Front, live: float) -> Floats:
    """Of each point, with `live` micro-batches kept."""
    total: Floats = front.static_bytes + live * front.kept_bytes
    return total
