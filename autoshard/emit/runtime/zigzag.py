"""The sequence in 2n chunks, of which device i holds the i-th and the i-th from the end: under a causal mask all
devices then have equal work. One all-to-all converts from sequence order, or to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .attention import held_range
from .axis import Axis


class Zigzag:
    """Position of the chunks of a dim of length `size` that `axes` shard: chunks 2i and 2i + 1 are the halves of device
    i's part in sequence order."""

    def __init__(self, axes: Sequence[Axis], size: int) -> None:
        self.axes = axes
        self.joint = axes[0].mesh.joint([axis.name for axis in axes])
        self.here, self.count = self.joint.index, self.joint.size
        shards = (held_range(size, axes, self._coordinates(number)) for number in range(self.count))
        halves = ((stop - start - (stop - start) // 2, (stop - start) // 2) for start, stop in shards)
        self.chunks = [length for pair in halves for length in pair]

    def number(self, coordinates: Sequence[int]) -> int:
        """Number of the device at these coordinates, row-major."""
        number = 0
        for axis, index in zip(self.axes, coordinates, strict=True):
            number = number * axis.size + index
        return number

    def _coordinates(self, number: int) -> list[int]:
        indices = []
        for axis in reversed(self.axes):
            number, index = divmod(number, axis.size)
            indices.append(index)
        return indices[::-1]

    def lengths(self, device: int) -> tuple[int, int]:
        """Lengths of a device's early and late chunk."""
        return self.chunks[device], self.chunks[2 * self.count - 1 - device]

    def pieces(self, ordered: bool) -> Pieces:
        """This device's pieces, in sequence order or not: the lengths of its two pieces, and the device that has each
        in the other order."""
        if ordered:
            first = 2 * self.here
            return Pieces(self.chunks[first : first + 2], [min(c, 2 * self.count - 1 - c) for c in (first, first + 1)])
        chunks = self.here, 2 * self.count - 1 - self.here
        return Pieces([self.chunks[chunk] for chunk in chunks], [chunk // 2 for chunk in chunks])


class Pieces(NamedTuple):
    lengths: list[int]
    others: list[int]

    def counts(self, devices: int) -> list[int]:
        """Number of rows for each device."""
        return [sum(n for n, o in zip(*self, strict=True) if o == other) for other in range(devices)]

    def by_device(self) -> list[int]:
        """Numbers of the pieces, those of the first device first."""
        return sorted(range(2), key=lambda piece: self.others[piece])


def exchange_rows(places: Zigzag, there: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Moves tensors (..., rows, d) from sequence order to that of `places` (`there`), or back, in one message per pair
    of devices. Gradients go the other way."""
    return cast(tuple[Tensor, ...], _Exchange.apply(places, there, *tensors))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, places: Zigzag, there: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.places, ctx.there = places, there
        return _moved(places, there, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_moved(ctx.places, not ctx.there, grads)


def _moved(places: Zigzag, there: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    source, taken = places.pieces(ordered=there), places.pieces(ordered=not there)
    cut = [x.split(source.lengths, -2) for x in tensors]
    row = sum(math.prod(x.shape[:-2]) * x.shape[-1] for x in tensors)
    sent = torch.cat([split[piece].reshape(-1) for piece in source.by_device() for split in cut])
    counts = ([row * n for n in pieces.counts(places.count)] for pieces in (source, taken))
    received = places.joint.transport.all_to_all(sent, *counts)
    shapes = [[(*x.shape[:-2], n, x.shape[-1]) for n in taken.lengths] for x in tensors]
    order = [(piece, x) for piece in taken.by_device() for x in range(len(tensors))]
    parts = received.split([math.prod(shapes[x][piece]) for piece, x in order])
    laid = {(piece, x): part.view(shapes[x][piece]) for (piece, x), part in zip(order, parts, strict=True)}
    return tuple(torch.cat([laid[0, x], laid[1, x]], -2) for x in range(len(tensors)))
