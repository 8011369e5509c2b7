"""Convolutions and pooling of images whose height or width (or depth) the mesh shards.

`depth`, `height`, `width`: the axes that shard that dim, each splitting what the previous one left; `sizes`: its
unsharded length (of every spatial dim, in order). The result is sharded by its own length. Each device fetches the rows
that its windows reach beyond its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import Axis
from .halo import Bounds, Coordinates, chunk, fetch_rows
from .operators import parallel_mean

Axes = Sequence[Axis]


@dataclass(frozen=True)
class _Window:
    """A sliding window along one dim of length `size`; `span` is its length including dilation."""

    size: int
    span: int
    stride: int
    padding: int
    ceil: bool = False

    @property
    def length(self) -> int:
        """Number of its positions."""
        room = self.size + 2 * self.padding - self.span
        count = -(-room // self.stride) + 1 if self.ceil else room // self.stride + 1
        return count - 1 if self.ceil and (count - 1) * self.stride >= self.size + self.padding else count

    def reach(self, positions: Bounds) -> Bounds:
        """Range that the windows at these positions cover; it may exceed [0, size)."""
        start, stop = positions
        return start * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.span

    def rows(self, positions: Bounds) -> Bounds:
        low, high = (min(max(bound, 0), self.size) for bound in self.reach(positions))
        return low, high


def _positions(length: int, axes: Axes) -> Bounds:
    return chunk(length, [axis.size for axis in axes], tuple(axis.index for axis in axes))


def _covered(x: Tensor, dim: int, window: _Window, axes: Axes, value: float = 0.0) -> Tensor:
    """Rows that this device's windows cover along `dim`, padded with `value` outside the image."""
    parts, length = [axis.size for axis in axes], window.length

    def wanted(place: Coordinates) -> Bounds:
        return window.rows(chunk(length, parts, place))

    rows = fetch_rows(x, dim, window.size, axes, wanted) if axes else x
    positions = _positions(length, axes)
    (low, high), (start, stop) = window.reach(positions), window.rows(positions)
    rows = rows.narrow(dim, 0, stop - start)  # without axes: windows may end before the image does
    before = max(0, min(start, high) - low)
    after = high - low - before - (stop - start)
    pads = [0] * (2 * (x.dim() - 1 - dim)) + [before, after]
    return F.pad(rows, pads, value=value) if before or after else rows


def _by_dim(count: int, depth: Axes, height: Axes, width: Axes) -> list[Axes]:
    return [depth, height, width][3 - count :]


def _named(name: str, count: int) -> Any:
    return getattr(F, f"{name}{count}d")


def halo_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int = 1,
    depth: Axes = (), height: Axes = (), width: Axes = (),
) -> Tensor:  # fmt: skip
    """Convolution of (batch, channels, *spatial) with some sharded spatial dims."""
    count, native = len(sizes), list(padding)
    for i, axes in enumerate(_by_dim(count, depth, height, width)):
        if axes:
            span = dilation[i] * (weight.shape[2 + i] - 1) + 1
            x = _covered(x, 2 + i, _Window(sizes[i], span, stride[i], padding[i]), axes)
            native[i] = 0
    result = _named("conv", count)(x, weight, bias, tuple(stride), tuple(native), tuple(dilation), groups)
    return cast(Tensor, result)


def halo_transposed_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], output_padding: Sequence[int], dilation: Sequence[int], groups: int = 1,
    depth: Axes = (), height: Axes = (), width: Axes = (),
) -> Tensor:  # fmt: skip
    """Transposed convolution of (batch, channels, *spatial) with some sharded spatial dims."""
    count, native, extra, ranges = len(sizes), list(padding), list(output_padding), []
    for i, axes in enumerate(_by_dim(count, depth, height, width)):
        if not axes:
            continue
        size, s, p = sizes[i], stride[i], padding[i]
        span = dilation[i] * (weight.shape[2 + i] - 1) + 1
        length = (size - 1) * s - 2 * p + span + output_padding[i]
        parts = [axis.size for axis in axes]

        def rows(bounds: Bounds, size: int = size, s: int = s, p: int = p, span: int = span) -> Bounds:
            """Input rows that contribute to the results [start, stop)."""
            low = min(max((bounds[0] + p - span + 1) // s, 0), size - 1)
            return low, max(low + 1, min((bounds[1] - 1 + p) // s + 1, size))

        def wanted(place: Coordinates, rows: Any = rows, n: int = length, parts: list[int] = parts) -> Bounds:
            return cast(Bounds, rows(chunk(n, parts, place)))

        x = fetch_rows(x, 2 + i, size, axes, wanted)
        start, stop = _positions(length, axes)
        low, high = rows((start, stop))
        native[i], extra[i] = 0, max(0, stop - ((high - 1) * s - p + span))
        ranges.append((2 + i, start - (low * s - p), stop - start))
    result = _named("conv_transpose", count)(
        x, weight, bias, tuple(stride), tuple(native), tuple(extra), groups, tuple(dilation)
    )
    for dim, first, many in ranges:
        result = result.narrow(dim, first, many)
    return cast(Tensor, result)


def halo_max_pool(
    x: Tensor, *, sizes: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil_mode: bool = False, depth: Axes = (), height: Axes = (), width: Axes = (),
) -> Tensor:  # fmt: skip
    """Maximum pooling of (..., *spatial) with some sharded spatial dims."""
    count, native, first = len(sizes), list(padding), x.dim() - len(sizes)
    for i, axes in enumerate(_by_dim(count, depth, height, width)):
        if axes or ceil_mode:
            size, span = sizes[i] if axes else x.shape[first + i], dilation[i] * (kernel_size[i] - 1) + 1
            x = _covered(x, first + i, _Window(size, span, stride[i], padding[i], ceil_mode), axes, -math.inf)
            native[i] = 0
    return cast(Tensor, _named("max_pool", count)(x, tuple(kernel_size), tuple(stride), tuple(native), tuple(dilation)))


def halo_avg_pool(
    x: Tensor, *, sizes: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
    depth: Axes = (), height: Axes = (), width: Axes = (),
) -> Tensor:  # fmt: skip
    """Mean pooling of (..., *spatial) with some sharded spatial dims. Every window divides by the number it counts."""
    count, first = len(sizes), x.dim() - len(sizes)
    counted = torch.ones((), dtype=x.dtype, device=x.device)
    for i, axes in enumerate(_by_dim(count, depth, height, width)):
        size = sizes[i] if axes else x.shape[first + i]
        window = _Window(size, kernel_size[i], stride[i], padding[i], ceil_mode)
        x = _covered(x, first + i, window, axes)
        low = torch.arange(*_positions(window.length, axes), device=x.device) * stride[i] - padding[i]
        high = (low + kernel_size[i]).clamp(max=size + padding[i])
        if not count_include_pad:
            low, high = low.clamp(min=0), high.clamp(max=size)
        counted = counted.unsqueeze(-1) * (high - low).to(x.dtype)
    means = cast(Tensor, _named("avg_pool", count)(x, tuple(kernel_size), tuple(stride)))
    whole = math.prod(kernel_size)
    return means * (whole / (divisor_override if divisor_override is not None else counted))


def parallel_global_pool(x: Tensor, *, sizes: Sequence[int]) -> Tensor:
    """This device's partial sum of the mean over a whole image, whose `sizes` the mesh shards."""
    return parallel_mean(x, dim=tuple(range(-len(sizes), 0)), keepdim=True, count=math.prod(sizes))
