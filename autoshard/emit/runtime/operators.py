"""Embeddings and means whose shards are joined.

`vocabulary`: the axes that shard the rows of a table, each splitting what the previous one left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import Axis, shard_bounds


def vocabulary_range(vocabulary: Sequence[Axis], size: int, parts: tuple[int, ...] = ()) -> tuple[int, int]:
    """[start, stop) of the classes on this device: each axis splits what the previous one left; or as in `parts`."""
    if parts:
        return shard_bounds(size, vocabulary[0], parts)
    start, stop = 0, size
    for axis in vocabulary:
        low, high = shard_bounds(stop - start, axis)
        start, stop = start + low, start + high
    return start, stop


def local_index(
    index: Tensor, start: int, stop: int, size: int, ignored: int | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Place of each index in this device's [start, stop), and whether it is there. An index that no device has, outside
    of [0, size) and not `ignored`, gets a place outside here, too: kernels then raise as they do on one device."""
    here, known = (index >= start) & (index < stop), (index >= 0) & (index < size)
    if ignored is not None:
        known |= index == ignored
    return torch.where(known, (index - start).clamp(0, max(stop - start - 1, 0)), stop - start), here


def vocabulary_parallel_embedding(
    weight: Tensor, ids: Tensor, *, size: int, vocabulary: Sequence[Axis], padding_idx: int = -1,
    parts: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """Rows of the local part of the table, zero for ids of other devices: a partial sum over `vocabulary`. `parts`:
    rows per device, if they are not equal."""
    start, stop = vocabulary_range(vocabulary, size, parts)
    if start == stop:
        return weight.sum(0).expand(*ids.shape, weight.shape[1])  # zeros that autograd still connects to the weight
    place, inside = local_index(ids, start, stop, size)
    padding = padding_idx - start if start <= padding_idx < stop else None
    return F.embedding(place, weight, padding).masked_fill(~inside.unsqueeze(-1), 0)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def parallel_mse_loss(input: Tensor, target: Tensor, *, count: int) -> Tensor:
    """This device's partial sum of the mean squared error over `count` elements of all devices."""
    squares = F.mse_loss(input, target, reduction="none")
    return (squares.sum(dtype=accumulation(squares.dtype)) / count).to(squares.dtype)


def parallel_mean(input: Tensor, *, dim: Sequence[int] | None, keepdim: bool = False, count: int) -> Tensor:
    """This device's partial sum of a mean over `count` elements (per result) of all devices."""
    dims = tuple(range(input.dim())) if dim is None or len(dim) == 0 else tuple(dim)
    return (input.sum(dims, keepdim, dtype=accumulation(input.dtype)) / count).to(input.dtype)
