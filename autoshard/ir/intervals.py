"""Indices of a sharded dim that each device holds, all at once: `layout.LocalSize.intervals` for a mesh, as arrays.

A cut is (parts, blocks, unit): an axis of `parts` devices shards, within each of `blocks` equal blocks of the dim, what
is held so far, in chunks of a multiple of `unit` (`layout.chunk_bounds`). A tuple as `unit` lists the length of every
chunk; that cut is the only one of its dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Unit = int | tuple[int, ...]
Cut = tuple[int, int, Unit]


def unit_text(blocks: int, unit: Unit) -> str:
    """Suffix for a sharded dim: `/3*64`, 3 blocks in units of 64; `[10+20]`, in these parts; "" for 1 and 1."""
    if isinstance(unit, tuple):
        return f"[{'+'.join(map(str, unit))}]"
    return (f"/{blocks}" if blocks != 1 else "") + (f"*{unit}" if unit != 1 else "")


def multiple(unit: Unit) -> int:
    """Number that the length of a block must be a multiple of."""
    return unit if isinstance(unit, int) else sum(unit)


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs [start, stop) with the rank that holds them, by rank, then ascending; neighbours of one rank are merged.

    `rank` is row-major over the cuts, `ranks` is how many there are. A rank without a run holds nothing.
    """

    size: int
    ranks: int
    start: Integers
    stop: Integers
    rank: Integers

    @cached_property
    def key(self) -> bytes:
        """Key that is equal for equal holdings of the same number of ranks."""
        return b"".join(array.tobytes() for array in (self.rank, self.start, self.stop))

    @cached_property
    def lengths(self) -> Integers:
        """How much each rank holds."""
        return np.bincount(self.rank, weights=self.stop - self.start, minlength=self.ranks).astype(np.int64)

    @property
    def some_empty(self) -> bool:
        return not self.lengths.all()

    def owners(self) -> Integers:
        """The rank that holds each index, shape (size,)."""
        order = np.argsort(self.start)
        return np.repeat(self.rank[order], (self.stop - self.start)[order])


@lru_cache(maxsize=2048)
def runs(size: int, cuts: tuple[Cut, ...]) -> Runs:
    """Holding that cuts in mesh order make of a dim of length `size`."""
    if not cuts:
        whole = np.array([0] if size else [], dtype=np.int64)
        return Runs(size, 1, whole, whole + size, whole)
    before, (parts, blocks, unit) = runs(size, cuts[:-1]), cuts[-1]
    start, stop, rank = _split(before.start, before.stop, before.rank, size // blocks) if size else (before.start,) * 3
    length = stop - start
    group = np.cumsum(_changes(rank, start // (size // blocks))) - 1 if size else start
    total = np.bincount(group, weights=length).astype(np.int64)
    position = np.cumsum(length) - length - (np.cumsum(total) - total)[group]
    if isinstance(unit, tuple):
        ends = np.cumsum((0, *unit))
        first = np.searchsorted(ends, position, "right") - 1
        count = np.searchsorted(ends, position + length - 1, "right") - first
        piece, index = _repeated(count)
        part = first[piece] + index
        lower, upper = ends[part], ends[part + 1]
    else:
        units = np.where(total % unit == 0, unit, 1)
        chunk = (-(-(total // units) // parts) * units)[group]
        first, count = position // chunk, (position + length - 1) // chunk - position // chunk + 1
        piece, index = _repeated(count)
        part = first[piece] + index
        lower, upper = part * chunk[piece], (part + 1) * chunk[piece]
    low = np.maximum(position[piece], lower)
    high = np.minimum((position + length)[piece], upper)
    moved = (start - position)[piece]
    return _merged(size, before.ranks * parts, low + moved, high + moved, rank[piece] * parts + part)


def _split(start: Integers, stop: Integers, rank: Integers, block: int) -> tuple[Integers, Integers, Integers]:
    """The runs cut at every multiple of `block`."""
    first = start // block
    piece, index = _repeated((stop - 1) // block - first + 1)
    at = first[piece] + index
    return np.maximum(start[piece], at * block), np.minimum(stop[piece], (at + 1) * block), rank[piece]


def _repeated(count: Integers) -> tuple[Integers, Integers]:
    """Item i `count[i]` times, and the number of each repetition."""
    piece = np.repeat(np.arange(len(count)), count)
    return piece, np.arange(len(piece)) - (np.cumsum(count) - count)[piece]


def _changes(*keys: Integers) -> NDArray[np.bool_]:
    """True at the first entry, and where any of the keys differs from its entry before."""
    new = np.ones(len(keys[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return new


def _merged(size: int, ranks: int, start: Integers, stop: Integers, rank: Integers) -> Runs:
    order = np.lexsort((start, rank))
    start, stop, rank = start[order], stop[order], rank[order]
    new = np.ones(len(start), dtype=bool)
    new[1:] = (rank[1:] != rank[:-1]) | (start[1:] != stop[:-1])
    last = np.append(new[1:], np.ones(min(1, len(new)), dtype=bool))
    return Runs(size, ranks, start[new], stop[last], rank[new])
