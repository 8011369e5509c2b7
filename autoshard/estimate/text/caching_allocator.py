"""Memory that torch's caching allocator reserves for tensors that come and go: it keeps its segments.

Follows CUDACachingAllocator of torch 2 with its defaults. Sizes are rounded up to 512 bytes. A tensor gets the smallest
free block of its pool that holds it, and the rest of that becomes a block again; if none does, the allocator takes a
segment of 2 MiB for tensors up to 1 MiB, of 20 MiB up to 10 MiB, and else of the tensor's size in multiples of 2 MiB.
Freed neighbours of a segment join. Segments that it gives back when a device is full are not modelled.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from autoshard.exports.memory_snapshot import ROUND_BYTES
from autoshard.units import parse_bytes

MIB = int(parse_bytes("1 MiB"))
SMALL_BYTES, SMALL_SEGMENT_BYTES = MIB, 2 * MIB
MIDDLE_BYTES, MIDDLE_SEGMENT_BYTES = 10 * MIB, 20 * MIB
LARGE_MULTIPLE_BYTES = SMALL_SEGMENT_BYTES

Life = tuple[int, int, float]  # first step, last step, bytes


@dataclass(eq=False)
class _AllocatorBlock:
    """A part of a segment, with its neighbours there."""

    bytes: int
    small: bool
    number: int
    used: bool = False
    before: _AllocatorBlock | None = None
    after: _AllocatorBlock | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.bytes, self.number


@dataclass
class CachingAllocator:
    """The caching allocator of one stream."""

    reserved_bytes: int = 0
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})  # by `small`
    _known: dict[int, _AllocatorBlock] = field(default_factory=dict)
    _numbers: Iterable[int] = field(default_factory=count)

    def allocate(self, size_bytes: float) -> _AllocatorBlock:
        """Allocates a block for a tensor."""
        size = max(ROUND_BYTES, math.ceil(size_bytes / ROUND_BYTES) * ROUND_BYTES)
        small = size <= SMALL_BYTES
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        block = self._known[free.pop(at)[1]] if at < len(free) else self._segment(size, small)
        remainder = block.bytes - size
        if remainder >= ROUND_BYTES if small else remainder > SMALL_BYTES:
            left = self._block(remainder, small, block, block.after)
            block.bytes = size
            self._put(left)
        block.used = True
        return block

    def free(self, block: _AllocatorBlock) -> None:
        """Frees a tensor's block, which joins free neighbours."""
        block.used = False
        for other in (block.before, block.after):
            if other is not None and not other.used:
                self._take(other)
                block.bytes += other.bytes
                self._unlink(other)
        self._put(block)

    def _segment(self, size: int, small: bool) -> _AllocatorBlock:
        if small:
            taken = SMALL_SEGMENT_BYTES
        elif size < MIDDLE_BYTES:
            taken = MIDDLE_SEGMENT_BYTES
        else:
            taken = math.ceil(size / LARGE_MULTIPLE_BYTES) * LARGE_MULTIPLE_BYTES
        self.reserved_bytes += taken
        return self._block(taken, small, None, None)

    def _block(
        self, size: int, small: bool, before: _AllocatorBlock | None, after: _AllocatorBlock | None
    ) -> _AllocatorBlock:
        block = _AllocatorBlock(size, small, next(iter(self._numbers)), False, before, after)
        self._known[block.number] = block
        if before is not None:
            before.after = block
        if after is not None:
            after.before = block
        return block

    def _unlink(self, block: _AllocatorBlock) -> None:
        if block.before is not None:
            block.before.after = block.after
        if block.after is not None:
            block.after.before = block.before
        del self._known[block.number]

    def _put(self, block: _AllocatorBlock) -> None:
        insort(self._free[block.small], block.key)

    def _take(self, block: _AllocatorBlock) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, block.key)]


def reserved_bytes(lives: Iterable[Life]) -> int:
    """Bytes of the segments after all `lives`; those that end with a step are freed before the next step's start."""
    starts: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    sizes = {}
    for number, (first, last, size) in enumerate(lives):
        if size > 0:
            starts[first].append(number)
            ends[last + 1].append(number)
            sizes[number] = size
    allocator = CachingAllocator()
    blocks: dict[int, _AllocatorBlock] = {}
    for step in sorted({*starts, *ends}):
        for number in ends[step]:
            allocator.free(blocks.pop(number))
        for number in starts[step]:
            blocks[number] = allocator.allocate(sizes[number])
    return allocator.reserved_bytes
