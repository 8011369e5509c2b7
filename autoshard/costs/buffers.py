"""Temporary bytes of a redistribution step, in addition to its source and target: what is packed for sending, padded to
equal parts, received and not yet in its place.

Each function follows the runtime (emit/runtime/redistribution.py, axis.py, exchange.py) allocation by allocation. A dim
is moved to the front, which takes a copy unless there is only one element before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoshard.ir.graph import DTYPE_BYTES
from autoshard.ir.intervals import Integers, Runs, runs
from autoshard.ir.layout import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL,
    Layout,
    LocalSize,
    Placement,
    Shard,
    chunk_bounds,
    local_sizes,
)
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, DimCut, LocalValue
from autoshard.redistribute import BY_INDEX, COLLECTIVES
from autoshard.rules.algebra.variant_record import Temporary

MEMBERS = 16  # of a group: those looked at for the one that sends and receives most


class Tape:
    """Bytes held now, and the most ever held."""

    def __init__(self) -> None:
        self.held = self.most = 0.0

    def make(self, size: float) -> float:
        self.held += size
        self.most = max(self.most, self.held)
        return size

    def drop(self, *sizes: float) -> None:
        self.held -= sum(sizes)


@dataclass(frozen=True)
class ExchangedDim:
    """A dim of `whole` elements, sharded in parts of `lengths` in each of its blocks. `before` and `after`: elements of
    the other dims (and blocks) outside and inside it."""

    lengths: tuple[int, ...]
    before: int
    after: int
    width: int  # bytes of an element

    def bytes(self, length: int) -> float:
        return float(self.before * length * self.after * self.width)

    @property
    def whole(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def moves(self, length: int) -> bool:
        """True if bringing the dim to the front, or back, takes a copy."""
        return self.before > 1 and length > 1


def gather(dim: ExchangedDim) -> float:
    """Temporary bytes of an all-gather, without the given part and the whole: the most over all lengths of a part."""
    return max(_gather(dim, length) for length in set(dim.lengths))


def _gather(dim: ExchangedDim, length: int) -> float:
    tape, parts = Tape(), len(dim.lengths)
    packed = tape.make(dim.bytes(length)) if dim.moves(length) else 0.0
    gathered = tape.make(dim.bytes(dim.longest * parts))
    if length < dim.longest:
        padding, padded = tape.make(dim.bytes(dim.longest - length)), tape.make(dim.bytes(dim.longest))
        tape.drop(padding, padded)
    if dim.longest * parts > dim.whole:
        joined = tape.make(dim.bytes(dim.whole))
        tape.drop(gathered)
        gathered = joined
    tape.drop(packed)
    if dim.moves(dim.whole):
        tape.make(dim.bytes(dim.whole))
    less = dim.bytes(dim.longest) - dim.bytes(length)  # given: the longest is counted
    return tape.most - dim.bytes(dim.whole) - less


def scatter(dim: ExchangedDim) -> float:
    """Temporary bytes of a reduce-scatter, without the given whole and the resulting part, the sum over all members."""
    tape = Tape()
    packed = tape.make(dim.bytes(dim.whole)) if dim.moves(dim.whole) else 0.0
    shorter = [length for length in dim.lengths if length < dim.longest]
    if shorter:
        padded = sum(tape.make(dim.bytes(dim.longest)) for _ in shorter)
        joined = tape.make(dim.bytes(dim.longest * len(dim.lengths)))
        tape.drop(padded, packed)
        packed = joined
    part = tape.make(dim.bytes(dim.longest))
    tape.drop(packed)
    if dim.moves(dim.longest):
        tape.make(part)
    return tape.most - part


def swap(source: float, target: float) -> float:
    """Temporary bytes of an all-to-all: the packed data or the received data, whichever is larger."""
    return max(source, target)


# --- steps of a program ---


def buffers(mesh: Mesh, step: Collective, source: LocalValue, target: LocalValue) -> Temporary:
    """Temporary bytes of `step` from `source` to `target`, forward and backward, on the device that holds most."""
    if step.forward in BY_INDEX:
        return Temporary(
            _by_index(mesh, step.forward, step, source, target), _back_by_index(mesh, step, source, target)
        )
    there = _by_table(mesh, step.forward, step, source, target)
    return Temporary(there, _by_table(mesh, step.backward, step, target, source))


def _by_table(mesh: Mesh, name: str, step: Collective, source: LocalValue, target: LocalValue) -> float:
    collective, cut = COLLECTIVES[name], step.joined or step.cut
    if collective.working == "swap":
        return swap(_bytes(source, mesh), _bytes(target, mesh))
    if cut is None or not collective.working:
        return 0.0
    whole, count = (target, gather) if collective.working == "gather" else (source, scatter)
    return count(_dim(mesh, step.axes, cut, whole))


def _dim(mesh: Mesh, axes: Sequence[str], cut: DimCut, whole: LocalValue) -> ExchangedDim:
    shape = [size.largest(mesh) for size in whole.local_shape]
    block, parts = shape[cut.dim] // cut.blocks, math.prod(mesh.axis_size(axis) for axis in axes)
    unit = cut.unit if block % cut.unit == 0 else 1
    bounds = [chunk_bounds(block, parts, index, unit) for index in range(parts)]
    before, after = math.prod(shape[: cut.dim]) * cut.blocks, math.prod(shape[cut.dim + 1 :])
    return ExchangedDim(tuple(stop - start for start, stop in bounds), before, after, DTYPE_BYTES[whole.dtype])


def _by_index(mesh: Mesh, name: str, step: Collective, source: LocalValue, target: LocalValue) -> float:
    return _routed(mesh, name, step.axes, source, source.layout, target.layout)


def _back_by_index(mesh: Mesh, step: Collective, source: LocalValue, target: LocalValue) -> float:
    if REPLICATE_PARTIAL in step.before:  # the way the value came
        return _routed(
            mesh, "exchange" if step.backward != "pad" else "pad", step.axes, source, source.layout, target.layout
        )
    return _routed(mesh, step.backward, step.axes, target, _of_gradient(target.layout), _of_gradient(source.layout))


def _of_gradient(layout: Layout) -> Layout:
    turned: dict[Placement, Placement] = {REPLICATE_PARTIAL: PARTIAL, PARTIAL: REPLICATE}
    return Layout(tuple(turned.get(placement, placement) for placement in layout.placements))


def _routed(mesh: Mesh, name: str, axes: Sequence[str], source: LocalValue, before: Layout, after: Layout) -> float:
    """Temporary bytes of a step by index: of an exchange what is sent (packed) and received; of a gather all that every
    member has. Data in blocks is taken out, and put in, through a copy of one piece."""
    width = DTYPE_BYTES[source.dtype]
    route = _route(mesh, tuple(axes), source.shape, before, after)
    in_blocks = any(isinstance(p, Shard) and p.blocks > 1 for p in (*before.placements, *after.placements))
    if name == "gather":
        parts = math.prod(mesh.axis_size(axis) for axis in axes)
        return _bytes(source, mesh) * parts + width * route.piece * in_blocks
    return float(width * max(route.moved if name == "exchange" else 0, route.local * in_blocks))


@dataclass(frozen=True)
class Route:
    """Elements on the device with most: `moved` (sent and received in an exchange), `local` (kept), and `piece` (the
    largest that one device has for another)."""

    moved: int
    local: int
    piece: int


@lru_cache(maxsize=65536)
def _route(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...], before: Layout, after: Layout) -> Route:
    moved = [mesh.index(axis) for axis in axes]
    places = [_at(mesh, moved, place) for place in itertools.product(*(range(mesh.sizes[a]) for a in moved))]
    # each receives a copy from the one with its own coordinate there
    same = [a for a in moved if not _differs(before.placements[a], after.placements[a])]
    at = np.array(places, dtype=np.int64)
    have, need = ([_held(size, mesh, at) for size in local_sizes(shape, layout, mesh)] for layout in (before, after))
    looked = min(len(places), MEMBERS)
    beside = (at[:looked, None, same] == at[None, :, same]).all(axis=2)
    sent, received = (np.where(beside, held, 0) for held in (_common(have, need, looked), _common(need, have, looked)))
    local = sent.diagonal()
    moved_each = sent.sum(axis=1) + received.sum(axis=1) - 2 * local
    return Route(int(moved_each.max()), int(local.max()), int(max(sent.max(), received.max())))


def _at(mesh: Mesh, axes: Sequence[int], place: Sequence[int]) -> tuple[int, ...]:
    """Coordinates of a member of the group: the first on the other axes."""
    at = dict(zip(axes, place, strict=True))
    return tuple(at.get(axis, 0) for axis in range(len(mesh.axes)))


def _differs(before: Placement, after: Placement) -> bool:
    """True if the devices along an axis hold different data: shards, or partial sums that are added up."""
    return isinstance(before, Shard) or before == PARTIAL != after


def _held(size: LocalSize, mesh: Mesh, at: Integers) -> tuple[Runs, Integers]:
    """Runs of a dim that members of a group, at coordinates `at` (members, axes), hold, and the rank of each there."""
    axes = [mesh.index(shard.axis) for shard in size.shards]
    cuts = tuple((mesh.sizes[axis], shard.blocks, shard.unit) for axis, shard in zip(axes, size.shards, strict=True))
    rank = np.zeros(len(at), dtype=np.int64)
    for axis in axes:
        rank = rank * mesh.sizes[axis] + at[:, axis]
    return runs(size.size, cuts), rank


def _common(owned: list[tuple[Runs, Integers]], others: list[tuple[Runs, Integers]], looked: int) -> Integers:
    """Counts (looked, members) of elements that each of the first members has of `owned` and each one of `others`."""
    counts = np.ones((looked, 1), dtype=np.int64)
    for (held, ranks), (other, their) in zip(owned, others, strict=True):
        there, row = np.unique(ranks[:looked], return_inverse=True)
        common = np.zeros((len(there), other.ranks), dtype=np.int64)
        for each, rank in zip(common, there, strict=True):
            mine = held.rank == rank
            start, stop = held.start[mine], held.stop[mine]
            inside = _below(start, stop, other.stop) - _below(start, stop, other.start)
            each[:] = np.bincount(other.rank, weights=inside, minlength=other.ranks)
        counts = counts * common[row][:, their]
    return counts


def _below(start: Integers, stop: Integers, position: Integers) -> Integers:
    """Number of elements in runs [start, stop), ascending, that lie below each position."""
    if not len(start):
        return np.zeros_like(position)
    whole = np.concatenate([[0], np.cumsum(stop - start)])
    run = np.maximum(np.searchsorted(start, position, side="right") - 1, 0)
    counted: Integers = whole[run] + np.clip(position - start[run], 0, (stop - start)[run])
    return counted


def _bytes(value: LocalValue, mesh: Mesh) -> float:
    return float(math.prod(size.largest(mesh) for size in value.local_shape) * DTYPE_BYTES[value.dtype])
