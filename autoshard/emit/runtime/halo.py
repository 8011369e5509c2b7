"""Rows that a device needs of a sharded dim: it receives missing ones from the devices that hold them.

A dim is split by torch.chunk, axis after axis. Any device may need any [start, stop): a halo wider than a neighbour's
shard comes from several devices. Gradients go back the same way and are added.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .axis import Axis

Bounds = tuple[int, int]
Coordinates = tuple[int, ...]
Wanted = Callable[[Coordinates], Bounds]


def chunk(size: int, parts: Sequence[int], coordinates: Coordinates) -> Bounds:
    """[start, stop) of a dim of `size` at these coordinates: each axis splits what the previous one left."""
    start, stop = 0, size
    for count, index in zip(parts, coordinates, strict=True):
        length = -(-(stop - start) // count)
        start, stop = min(start + index * length, stop), min(start + (index + 1) * length, stop)
    return start, stop


class _Hop(NamedTuple):
    """Messages of one device along one axis (local rows for each peer), and how many rows it gets from each.

    They come in order: the next device along an axis holds later rows.
    """

    sent: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    silent: bool  # nobody along this axis lacks anything


@lru_cache(maxsize=1024)
def plan(size: int, parts: tuple[int, ...], wanted: tuple[Bounds, ...], coords: Coordinates) -> tuple[_Hop, ...]:
    """One hop for each axis, the innermost first. `wanted`: the rows that each device needs, row-major."""
    places = list(itertools.product(*map(range, parts)))
    needs = dict(zip(places, wanted, strict=True))
    owner = {row: place for place in places for row in range(*chunk(size, parts, place))}

    def held(place: Coordinates, hops: int) -> list[int]:
        """Rows at `place` before the hop over axis `hops - 1`: owned here on the outer axes, needed by a device that
        differs from it there only."""
        peers = (p for p in places if p[hops:] == place[hops:])
        rows = {row for peer in peers for row in range(*needs[peer])}
        return sorted(row for row in rows if owner[row][:hops] == place[:hops])

    hops = []
    for axis in reversed(range(len(parts))):
        line = [(*coords[:axis], index, *coords[axis + 1 :]) for index in range(parts[axis])]
        first = axis == len(parts) - 1
        before = {p: list(range(*chunk(size, parts, p))) if first else held(p, axis + 1) for p in line}
        after = {p: held(p, axis) for p in line}
        moved = {(a, b): [row for row in after[b] if row in set(before[a])] for a in line for b in line}
        position = {row: index for index, row in enumerate(before[coords])}
        hops.append(
            _Hop(
                tuple(tuple(position[row] for row in moved[coords, peer]) for peer in line),
                tuple(len(moved[peer, coords]) for peer in line),
                not any(rows for (a, b), rows in moved.items() if a != b),
            )
        )
    return tuple(hops)


def _pick(x: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    if list(rows) == list(range(rows[0], rows[0] + len(rows)) if rows else ()):
        return x.narrow(dim, rows[0] if rows else 0, len(rows))
    return x.index_select(dim, torch.tensor(rows, device=x.device))


def _add(result: Tensor, dim: int, rows: Sequence[int], piece: Tensor) -> None:
    """Adds a piece to these rows."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        result.narrow(dim, rows[0], len(rows)).add_(piece)
    else:
        result.index_add_(dim, torch.tensor(rows, device=result.device), piece.contiguous())


def _swap(axis: Axis, dim: int, pieces: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Every device's piece for this one; this device's own piece does not travel."""
    here = axis.index
    sent = [piece.movedim(dim, 0) for piece in pieces]
    send = [0 if i == here else len(piece) for i, piece in enumerate(sent)]
    receive = [0 if i == here else count for i, count in enumerate(counts)]
    packed = torch.cat([piece for i, piece in enumerate(sent) if i != here]).contiguous()
    received = [piece.movedim(0, dim) for piece in axis.transport.all_to_all(packed, send, receive).split(receive)]
    received[here] = pieces[here]
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, hop: _Hop) -> Tensor:
        ctx.options = axis, dim, hop, x.shape[dim]
        pieces = [_pick(x, dim, rows) for rows in hop.sent]
        if hop.silent:
            return pieces[axis.index].clone()
        return torch.cat(_swap(axis, dim, pieces, hop.counts), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, dim, hop, size = ctx.options
        grad = grads[0]
        lengths = [len(rows) for rows in hop.sent]
        pieces = list(grad.split(list(hop.counts), dim))
        back = pieces if hop.silent else _swap(axis, dim, pieces, lengths)
        result = grad.new_zeros((*grad.shape[:dim], size, *grad.shape[dim + 1 :]))
        for rows, piece in zip(hop.sent, back, strict=True):
            if rows and (not hop.silent or rows is hop.sent[axis.index]):
                _add(result, dim, rows, piece)
        return result, None, None, None


def fetch_rows(x: Tensor, dim: int, size: int, axes: Sequence[Axis], wanted: Wanted) -> Tensor:
    """The rows `wanted(own coordinates)` of a dim of `size` that `axes` shard; every device must call it."""
    parts, coords = tuple(axis.size for axis in axes), tuple(axis.index for axis in axes)
    needs = tuple(wanted(place) for place in itertools.product(*map(range, parts)))
    dim = dim % x.dim()
    for axis, hop in zip(reversed(axes), plan(size, parts, needs, coords), strict=True):
        if hop.silent and hop.sent[axis.index] == tuple(range(x.shape[dim])):
            continue
        x = cast(Tensor, _Exchange.apply(x, axis, dim, hop))
    return x
