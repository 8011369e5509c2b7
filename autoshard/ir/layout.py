"""How one tensor lies on the mesh: a placement per mesh axis, each a pair (value, gradient).

Placements print as `S0` (shard dim 0), `S1/3` (three blocks), `S1/3*64` (blocks sharded in multiples of 64),
`S0[10+20]` (in parts of these lengths),
`R` (replicated, whole gradient), `R+` (replicated, partial gradient), `P` (partial value, whole gradient);
a layout prints as its placements in mesh order, `S0 R+`, and parses back; one in the memory of the devices' hosts ends
in `host`: `S0 R host`.

Several axes on one dim nest in mesh order. `blocks` counts global blocks. Uneven shards follow `torch.chunk`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autoshard.ir.intervals import Cut, Unit, runs, unit_text
from autoshard.ir.mesh import Mesh

_SHARD = re.compile(r"^S(\d+)(?:\[(\d+(?:\+\d+)*)\]|(?:/(\d+))?(?:\*(\d+))?)$")


@dataclass(frozen=True, order=True)
class Shard:
    """Dim `dim` is split into `blocks` equal blocks, and each block into chunks of a multiple of `unit`, or of the
    lengths that it lists."""

    dim: int
    blocks: int = 1
    unit: Unit = 1

    def __str__(self) -> str:
        return f"S{self.dim}{unit_text(self.blocks, self.unit)}"


@dataclass(frozen=True, order=True)
class Replicate:
    """Everything on each device; the gradient is whole on each, or (partial) their sum is the gradient."""

    partial_gradient: bool = False

    def __str__(self) -> str:
        return "R+" if self.partial_gradient else "R"


@dataclass(frozen=True, order=True)
class Partial:
    """Each device holds a partial sum of the value; the gradient is whole on each."""

    def __str__(self) -> str:
        return "P"


Placement = Shard | Replicate | Partial
REPLICATE, REPLICATE_PARTIAL, PARTIAL = Replicate(), Replicate(True), Partial()
HOST = "host"


def parse_placement(text: str) -> Placement:
    fixed: dict[str, Placement] = {"R": REPLICATE, "R+": REPLICATE_PARTIAL, "P": PARTIAL}
    if text in fixed:
        return fixed[text]
    match = _SHARD.match(text)
    if match is None:
        raise ValueError(f"not a placement: {text!r}")
    if match[2]:
        return Shard(int(match[1]), 1, tuple(map(int, match[2].split("+"))))
    return Shard(int(match[1]), int(match[3] or 1), int(match[4] or 1))


@dataclass(frozen=True)
class Layout:
    """One placement per mesh axis, in mesh order. `host`: each device's part lies in the memory of its host."""

    placements: tuple[Placement, ...]
    host: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.placements, self.host))

    def __str__(self) -> str:
        return " ".join([*map(str, self.placements), *([HOST] if self.host else [])])

    @property
    def in_parts(self) -> bool:
        """Is a dim in parts of lengths that are given?"""
        return any(isinstance(placement, Shard) and isinstance(placement.unit, tuple) for placement in self.placements)

    def on(self, mesh: Mesh) -> str:
        """Placements with the axes named: `S0@dp R+@tp`."""
        text = " ".join(f"{p}@{name}" for p, name in zip(self.placements, mesh.names, strict=True))
        return f"{text} on the host" if self.host else text

    @staticmethod
    def parse(text: str) -> Layout:
        parts = text.split()
        host = parts[-1:] == [HOST]
        placements = tuple(map(parse_placement, parts[: len(parts) - host]))
        return _on_host(placements) if host else _shared(placements)

    @staticmethod
    def replicated(mesh: Mesh) -> Layout:
        return Layout((REPLICATE,) * len(mesh.axes))

    def replace(self, axis: int, placement: Placement) -> Layout:
        return Layout(self.placements[:axis] + (placement,) + self.placements[axis + 1 :], self.host)

    def in_host_memory(self) -> Layout:
        """Layout with the same placements, in the memory of the hosts."""
        return _on_host(self.placements)

    def shards(self, dim: int) -> tuple[tuple[int, Shard], ...]:
        """The (axis index, Shard) pairs that shard `dim`, in mesh order."""
        return tuple((a, p) for a, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim)


def chunk_bounds(size: int, parts: int, index: int, unit: Unit = 1) -> tuple[int, int]:
    """[start, stop) of chunk `index`: torch.chunk's rule in multiples of `unit` (a divisor of `size`), or as listed."""
    if isinstance(unit, tuple):
        return sum(unit[:index]), sum(unit[: index + 1])
    assert size % unit == 0, (size, unit)
    length = -(-(size // unit) // parts) * unit
    return min(index * length, size), min((index + 1) * length, size)


@dataclass(frozen=True)
class AxisShard:
    """One axis' shards of a dim: mesh axis `axis`, in `blocks` global blocks, in multiples of `unit`."""

    axis: str
    blocks: int = 1
    unit: Unit = 1


@dataclass(frozen=True)
class LocalSize:
    """The local length of a dim of global length `size`: the same expression on every rank (SPMD)."""

    size: int
    shards: tuple[AxisShard, ...] = ()

    def intervals(self, mesh: Mesh, coordinates: Sequence[int]) -> list[tuple[int, int]]:
        """The global [start, stop) intervals a device holds, ascending, in local order; never empty ones.

        Definition: start from the whole dim; each axis in turn cuts, within every global block of its own,
        the part that is held so far (a run of held positions, in order) by `chunk_bounds`.
        """
        held = [(0, self.size)] if self.size else []
        for shard in self.shards:
            axis = mesh.index(shard.axis)
            held = _cut(held, self.size // shard.blocks, shard.unit, mesh.sizes[axis], coordinates[axis])
        return held

    def evaluate(self, mesh: Mesh, coordinates: Sequence[int]) -> int:
        if not self.shards:
            return self.size
        cuts: list[Cut] = []
        rank = 0
        for shard in self.shards:
            axis = mesh.index(shard.axis)
            cuts.append((mesh.sizes[axis], shard.blocks, shard.unit))
            rank = rank * mesh.sizes[axis] + coordinates[axis]
        return int(runs(self.size, tuple(cuts)).lengths[rank])

    def largest(self, mesh: Mesh) -> int:
        """The largest local length over all devices: coordinate 0 holds it by the chunk rule, or any as listed."""
        length = self.size
        for shard in self.shards:
            if shard.blocks != 1 or shard.unit != 1:
                return self._largest_in_units(mesh)
            length = -(-length // mesh.axis_size(shard.axis))
        return length

    def _largest_in_units(self, mesh: Mesh) -> int:
        if any(isinstance(shard.unit, tuple) for shard in self.shards):
            cuts = tuple((mesh.axis_size(shard.axis), shard.blocks, shard.unit) for shard in self.shards)
            return int(runs(self.size, cuts).lengths.max())
        return self.evaluate(mesh, (0,) * len(mesh.axes))

    def is_even(self, mesh: Mesh) -> bool:
        """True where every device holds the same length, so that the length is one integer."""
        if not self.shards:
            return True
        parts = 1
        for shard in self.shards:
            parts *= mesh.axis_size(shard.axis)
        last = tuple(size - 1 for size in mesh.sizes)
        return self.largest(mesh) * parts == self.size and self.evaluate(mesh, last) == self.largest(mesh)


def _cut(held: list[tuple[int, int]], block: int, unit: Unit, parts: int, index: int) -> list[tuple[int, int]]:
    """Chunk `index` of `parts` of what is held within each global block of length `block`."""
    result: list[tuple[int, int]] = []
    by_block: dict[int, list[tuple[int, int]]] = {}
    for start, stop in held:
        while start < stop:
            end = min(stop, (start // block + 1) * block)
            by_block.setdefault(start // block, []).append((start, end))
            start = end
    for _, pieces in sorted(by_block.items()):
        length = sum(stop - start for start, stop in pieces)
        chunk_unit = unit if isinstance(unit, tuple) or length % unit == 0 else 1
        low, high = chunk_bounds(length, parts, index, chunk_unit)
        position = 0
        for start, stop in pieces:
            first, last = max(low - position, 0), min(high - position, stop - start)
            if first < last:
                result.append((start + first, start + last))
            position += stop - start
    return _merged(result)


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def local_sizes(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[LocalSize, ...]:
    """The local shape of a tensor as expressions, one per dim."""
    return _local_sizes(tuple(shape), layout, mesh)


@lru_cache(maxsize=16384)
def _local_sizes(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[LocalSize, ...]:
    """Cached local sizes: every program and every price asks for those of the same few shapes."""
    return tuple(
        LocalSize(size, tuple(AxisShard(mesh.names[a], s.blocks, s.unit) for a, s in layout.shards(dim)))
        for dim, size in enumerate(shape)
    )


def local_shape(shape: Sequence[int], layout: Layout, mesh: Mesh, coordinates: Sequence[int]) -> tuple[int, ...]:
    """The local shape on the device at `coordinates`."""
    return tuple(size.evaluate(mesh, coordinates) for size in local_sizes(shape, layout, mesh))


def largest_shape(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The local shape on the device that holds most (coordinate 0 of every axis): what costs are charged for."""
    return _largest_shape(tuple(shape), layout, mesh)


@lru_cache(maxsize=16384)
def _largest_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    return tuple(size.largest(mesh) for size in _local_sizes(shape, layout, mesh))


def normalise(layout: Layout, shape: Sequence[int], mesh: Mesh, differentiable: bool = True) -> Layout:
    """One spelling per meaning, so that equal layouts compare equal.

    An axis of size 1 is `R`; a `unit` that changes nothing is dropped; a `blocks` that changes nothing is dropped;
    without a gradient `R+` is `R`.
    """
    placements: list[Placement] = []
    for axis, placement in enumerate(layout.placements):
        if mesh.sizes[axis] == 1 or (placement == REPLICATE_PARTIAL and not differentiable):
            placement = REPLICATE
        placements.append(placement)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and (placement.blocks, placement.unit) != (1, 1):
            placements[axis] = _simplest(placement, placements, axis, shape[placement.dim], mesh)
    return _on_host(tuple(placements)) if layout.host else _shared(tuple(placements))


@lru_cache(maxsize=65536)
def _shared(placements: tuple[Placement, ...]) -> Layout:
    """One object for equal layouts: looking it up in a table is then a look at its address."""
    return Layout(placements)


@lru_cache(maxsize=65536)
def _on_host(placements: tuple[Placement, ...]) -> Layout:
    return Layout(placements, host=True)


def _simplest(shard: Shard, placements: list[Placement], axis: int, size: int, mesh: Mesh) -> Shard:
    """The plainest shard that puts the same indices on every device as `shard` does."""
    outer = [(a, p) for a, p in enumerate(placements[:axis]) if isinstance(p, Shard) and p.dim == shard.dim]

    def sets(candidate: Shard) -> bytes:
        cuts = ((mesh.sizes[a], p.blocks, p.unit) for a, p in (*outer, (axis, candidate)))
        return runs(size, tuple(cuts)).key  # what a device holds depends on the axes that cut only

    wanted = sets(shard)
    if isinstance(shard.unit, tuple):
        return shard  # as it was asked for, even where the chunk rule would give the same
    for candidate in (Shard(shard.dim), Shard(shard.dim, shard.blocks), Shard(shard.dim, 1, shard.unit)):
        if candidate != shard and sets(candidate) == wanted:
            return candidate
    return shard
