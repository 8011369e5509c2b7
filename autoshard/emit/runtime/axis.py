"""One mesh axis: its raw collectives, and the part of a sharded dim that a device holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .mesh import ParallelMesh

from .functional_collectives import FunctionalCollectives

Map = Callable[[Tensor], Tensor]


class Sent(Protocol):
    """A message in flight; the sent tensor must not change until it is completed."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


class Transport(Protocol):
    """The raw collectives of one group of devices; all work along dim 0 of contiguous tensors, without gradients."""

    def all_reduce(self, x: Tensor, op: str = "sum") -> Callable[[], object]:
        """Reduces `x` in place by "sum" or "max"; `x` is ready once the returned function was called."""

    def all_gather(self, x: Tensor, lengths: Sequence[int]) -> Tensor: ...
    def start_all_gather(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        """Starts an all-gather; the returned function gives the result. `x` must not change until then."""

    def reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Tensor: ...
    def start_reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]: ...
    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor: ...
    def shift(self, x: Tensor, distance: int, length: int) -> Callable[[], Tensor]:
        """Sends `x` to the device `distance` further on and receives `length` numbers; the returned function gives
        them."""

    def send(self, x: Tensor, to: int) -> Sent:
        """Sends `x` to member `to` of the group."""

    def receive(self, x: Tensor, source: int) -> Callable[[], object]:
        """Receives into `x`, which is ready once the returned function was called."""

    def barrier(self) -> None: ...


class GroupTransport:
    """Transport of a torch.distributed process group. Uneven gathers and scatters are padded to the longest part."""

    # torch 2.13 renamed these two
    _all_gather = staticmethod(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)
    _reduce_scatter = staticmethod(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.functional = FunctionalCollectives(group)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Callable[[], object]:
        if torch.compiler.is_compiling():
            return self.functional.all_reduce(x, op)
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        work = dist.all_reduce(x, reduce_op, group=self.group, async_op=True)
        return cast(Callable[[], object], work.wait)

    def all_gather(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.start_all_gather(x, lengths)()

    def start_all_gather(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        longest = max(lengths)
        if torch.compiler.is_compiling():
            return self.functional.all_gather(_pad_to(x, longest), lengths)
        gathered, sent = x.new_empty((longest * len(lengths), *x.shape[1:])), _pad_to(x, longest)
        work = self._all_gather(gathered, sent, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            if min(lengths) == longest:
                return gathered
            return torch.cat([gathered[i * longest : i * longest + n] for i, n in enumerate(lengths)])

        return wait

    def reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.start_reduce_scatter(x, lengths)()

    def start_reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        longest = max(lengths)
        if min(lengths) < longest:
            x = torch.cat([_pad_to(piece, longest) for piece in x.split(list(lengths))])
        if torch.compiler.is_compiling():
            return self.functional.reduce_scatter(x, lengths)
        scattered = x.new_empty((longest, *x.shape[1:]))
        work = self._reduce_scatter(scattered, x, group=self.group, async_op=True)

        def wait(_: Tensor = x) -> Tensor:  # what is sent is there until then, as on every backend
            work.wait()
            return scattered[: lengths[dist.get_rank(self.group)]]

        return wait

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        if torch.compiler.is_compiling():
            return self.functional.all_to_all(x, send, receive)
        received = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(received, x, list(receive), list(send), group=self.group)
        return received

    def shift(self, x: Tensor, distance: int, length: int) -> Callable[[], Tensor]:
        group, received = self.group or dist.group.WORLD, x.new_empty(length)
        ranks, here = dist.get_process_group_ranks(group), dist.get_rank(group)
        to, source = ranks[(here + distance) % len(ranks)], ranks[(here - distance) % len(ranks)]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, received, source, group)]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    def send(self, x: Tensor, to: int) -> Sent:
        work = dist.isend(x, dist.get_global_rank(self.group or dist.group.WORLD, to), group=self.group)
        assert work is not None
        return cast(Sent, work)

    def receive(self, x: Tensor, source: int) -> Callable[[], object]:
        work = dist.irecv(x, dist.get_global_rank(self.group or dist.group.WORLD, source), group=self.group)
        assert work is not None
        return cast(Callable[[], object], work.wait)

    def barrier(self) -> None:
        dist.barrier(self.group)


def _pad_to(x: Tensor, length: int) -> Tensor:
    return x if len(x) == length else torch.cat([x, x.new_zeros((length - len(x), *x.shape[1:]))])


@dataclass(frozen=True, eq=False)
class Axis:
    """One mesh axis (or several joined), as this device sees it."""

    name: str
    size: int
    index: int  # the coordinate of this device
    transport: Transport
    mesh: ParallelMesh
    names: tuple[str, ...]  # of the axes that are joined

    @property
    def place(self) -> int:
        """Coordinate that is computed for: that of the slice, while a slice of a micro-batch runs."""
        if self.mesh.slice_at is None or self.mesh.slice_at[0] not in self.names:
            return self.index
        slice_at = self.mesh.slice_at
        at, place = self.mesh.coordinates | {slice_at[0]: slice_at[1]}, 0
        for name in self.names:
            place = place * self.mesh.axes[name] + at[name]
        return place


Unit = int | tuple[int, ...]  # a chunk is a multiple of it, or has the length listed for its device


def shard_bounds(size: int, axis: Axis, unit: Unit = 1, index: int | None = None) -> tuple[int, int]:
    """[start, stop) that one device holds of a dim (or block) of length `size`: torch.chunk in multiples of `unit`, or
    the listed lengths."""
    return _bounds(size, axis.size, unit, axis.index if index is None else index)


def _bounds(size: int, devices: int, unit: Unit, index: int) -> tuple[int, int]:
    if isinstance(unit, tuple):
        return sum(unit[:index]), sum(unit[: index + 1])
    unit = unit if size % unit == 0 else 1
    length = -(-(size // unit) // devices) * unit
    return min(index * length, size), min((index + 1) * length, size)


def shard_size(size: int, axis: Axis, blocks: int = 1, unit: Unit = 1, index: int | None = None) -> int:
    """Local length of a dim of length `size` that `axis` shards."""
    start, stop = shard_bounds(size // blocks, axis, unit, index)
    return blocks * (stop - start)


_PLACEMENT = re.compile(r"S(\d+)(?:\[([\d+]+)\])?(?:/(\d+))?(?:\*(\d+))?")


def shard_cuts(layout: str, mesh: ParallelMesh) -> list[tuple[Axis, int, int, Unit]]:
    """The (axis, dim, blocks, unit) of every shard in a layout's text."""
    return [(mesh[name], dim, blocks, unit) for name, dim, blocks, unit in layout_cuts(layout, tuple(mesh.axes))]


def layout_cuts(layout: str, names: Sequence[str]) -> list[tuple[str, int, int, Unit]]:
    """(axis name, dim, blocks, unit) of every shard in a layout's text, for a mesh with axes of these names."""
    matches = zip(names, map(_PLACEMENT.fullmatch, layout.split()), strict=True)
    return [(name, int(m[1]), int(m[3] or 1), _unit(m[2], m[4])) for name, m in matches if m]


def _unit(parts: str | None, unit: str | None) -> Unit:
    return tuple(map(int, parts.split("+"))) if parts else int(unit or 1)


Cut = tuple[int, int, int, Unit]  # over how many devices, which of them this is, blocks, unit


def dim_cuts(
    dim: int, layout: str, mesh: ParallelMesh, coordinates: Mapping[str, int] | None = None
) -> tuple[Cut, ...]:
    """Shards of `dim` on this device (or the one at `coordinates`), the outermost first."""
    at = mesh.coordinates if coordinates is None else coordinates
    return tuple(
        (axis.size, at[axis.name], blocks, unit) for axis, d, blocks, unit in shard_cuts(layout, mesh) if d == dim
    )


def cut_indices(size: int, cuts: tuple[Cut, ...]) -> Tensor:
    """Positions of [0, size) that remain after `cuts`, in local order."""
    held = torch.arange(size)
    for devices, index, blocks, unit in cuts:
        runs = held.split(torch.unique_consecutive(held // (size // blocks), return_counts=True)[1].tolist())
        held = torch.cat([run[slice(*_bounds(len(run), devices, unit, index))] for run in runs] or [held])
    return held


def held_indices(
    size: int, dim: int, layout: str, mesh: ParallelMesh, coordinates: Mapping[str, int] | None = None
) -> Tensor:
    """Global positions along `dim` that this device (or the one at `coordinates`) holds, in local order."""
    return cut_indices(size, dim_cuts(dim, layout, mesh, coordinates))
