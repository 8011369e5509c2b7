"""A tensor moved from one mesh to another: the messages between devices, by the index sets of both layouts.

What a device of the first mesh has for one of the second is a product of index sets, one per dim, whatever the shards.
Where several hold the same, each reader receives from the one that has sent least so far. The first mesh holds no sum:
it is added up there, before. For a sum on the second, the device at 0 of its axes gets the value, others zeros.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .axis import Cut, cut_indices, layout_cuts

if TYPE_CHECKING:
    from .mesh import ParallelMesh

Axes = tuple[tuple[str, int], ...]


class MeshLayout(NamedTuple):
    """Layout of a tensor on a mesh: a placement for each of its axes, as text."""

    axes: Axes
    layout: str

    @property
    def of_gradient(self) -> MeshLayout:
        """Layout of its gradient, as a layout of values."""
        texts = ({"R+": "P", "P": "R"}.get(placement, placement) for placement in self.layout.split())
        return MeshLayout(self.axes, " ".join(texts))

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes over which the tensor is a partial sum."""
        pairs = zip(self.axes, self.layout.split(), strict=True)
        return tuple(name for (name, _), placement in pairs if placement == "P")


class Piece(NamedTuple):
    """Message from rank `sender` of the first mesh to rank `receiver` of the second: its indices along each dim."""

    sender: int
    receiver: int
    get: tuple[Tensor, ...]
    put: tuple[Tensor, ...]
    lengths: tuple[int, ...]


Held = tuple[tuple[Cut, ...], ...]  # of each dim: what cuts it on a device


@lru_cache(maxsize=1024)
def pieces(shape: tuple[int, ...], first: MeshLayout, second: MeshLayout) -> tuple[Piece, ...]:
    """All messages, in order of the receivers."""
    if first == second:  # each device to the one that is as it
        every = [(rank, rank, held, held) for rank, held in enumerate(_held(first, len(shape)))]
    else:
        every = _assigned(shape, first, second)
    transfers = []
    for sender, receiver, has, needs in every:
        common = [_common(size, *cuts) for size, *cuts in zip(shape, has, needs, strict=True)]
        lengths = tuple(len(put) for _, put in common)
        if 0 not in lengths:
            get, put = tuple(index for index, _ in common), tuple(index for _, index in common)
            transfers.append(Piece(sender, receiver, get, put, lengths))
    return tuple(transfers)


def _assigned(
    shape: tuple[int, ...], first: MeshLayout, second: MeshLayout
) -> list[tuple[int, int, Held, Held]]:  # fmt: skip
    holders: dict[Held, list[int]] = {}
    for rank, held in enumerate(_held(first, len(shape))):
        holders.setdefault(held, []).append(rank)
    sent, transfers = dict.fromkeys(range(math.prod(n for _, n in first.axes)), 0), []
    for receiver, (needs, counts) in enumerate(zip(_held(second, len(shape)), _first_of_sum(second), strict=True)):
        for has, ranks in holders.items() if counts else ():
            common = [_common(size, *cuts) for size, *cuts in zip(shape, has, needs, strict=True)]
            if size := math.prod(len(put) for _, put in common):
                sender = min(ranks, key=lambda rank: (sent[rank], rank != receiver, rank))
                sent[sender] += size
                transfers.append((sender, receiver, has, needs))
    return transfers


def _coordinates(axes: Axes) -> list[dict[str, int]]:
    """Mesh coordinates of each rank."""
    every = itertools.product(*(range(size) for _, size in axes))
    return [dict(zip((name for name, _ in axes), indices, strict=True)) for indices in every]


def _first_of_sum(where: MeshLayout) -> list[bool]:
    return [all(at[name] == 0 for name in where.summed) for at in _coordinates(where.axes)]


def _held(where: MeshLayout, dims: int) -> list[Held]:
    """Shards of each dim on each rank."""
    cuts = layout_cuts(where.layout, [name for name, _ in where.axes])
    sizes = dict(where.axes)
    return [
        tuple(tuple((sizes[n], at[n], blocks, unit) for n, d, blocks, unit in cuts if d == dim) for dim in range(dims))
        for at in _coordinates(where.axes)
    ]


@lru_cache(maxsize=4096)
def _common(size: int, have: tuple[Cut, ...], need: tuple[Cut, ...]) -> tuple[Tensor, Tensor]:
    """Positions in `have` and in `need` of the indices that both hold, in the order of `need`."""
    held, needed = cut_indices(size, have), cut_indices(size, need)
    place = torch.full((size,), -1)
    place[held] = torch.arange(len(held))
    put = (place[needed] >= 0).nonzero().squeeze(1)
    return place[needed][put], put


def taken(x: Tensor, piece: Piece) -> Tensor:
    """A piece's elements of the sender's tensor."""
    if piece.lengths == x.shape:
        return x.contiguous()
    for dim, index in enumerate(piece.get):
        x = x.index_select(dim, index.to(x.device))
    return x.contiguous()


def put(
    shape: tuple[int, ...], received: list[tuple[Piece, Tensor]], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The receiver's tensor, assembled from the received pieces."""
    if len(received) == 1 and received[0][0].lengths == shape:
        return received[0][1]
    result = torch.zeros(shape, device=device, dtype=dtype)
    for piece, x in received:
        indices = piece.put
        where = tuple(index.view(-1, *[1] * (len(indices) - 1 - dim)).to(x.device) for dim, index in enumerate(indices))
        result[where] = x
    return result


def whole_sum(x: Tensor, where: MeshLayout, mesh: ParallelMesh) -> Tensor:
    """`x` summed over the axes of this mesh on which it is a partial sum."""
    if not where.summed:
        return x
    x = x.contiguous().clone()
    mesh.joint(where.summed).transport.all_reduce(x)()
    return x
