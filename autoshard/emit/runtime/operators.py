"""Operators whose shards must talk.

`rows`: the axes that cut the batch; `vocabulary`: those that cut the classes, each what the one before left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import Axis, shard_bounds
from .redistribution import reduced


def vocabulary_range(vocabulary: Sequence[Axis], size: int) -> tuple[int, int]:
    """The [start, stop) of the classes on this device: each axis cuts what the one before left."""
    start, stop = 0, size
    for axis in vocabulary:
        low, high = shard_bounds(stop - start, axis)
        start, stop = start + low, start + high
    return start, stop


def vocabulary_parallel_embedding(
    weight: Tensor, ids: Tensor, *, size: int, vocabulary: Sequence[Axis], padding_idx: int = -1
) -> Tensor:
    """Rows of the local part of the table, zero for ids of other devices: a summand over `vocabulary`."""
    start, stop = vocabulary_range(vocabulary, size)
    if start == stop:
        return weight.sum(0).expand(*ids.shape, weight.shape[1])  # zeros that autograd still connects to the weight
    inside = (ids >= start) & (ids < stop)
    padding = padding_idx - start if start <= padding_idx < stop else None
    rows = F.embedding((ids - start).clamp(0, stop - start - 1), weight, padding)
    return rows.masked_fill(~inside.unsqueeze(-1), 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, rows: Sequence[Axis], vocabulary: Sequence[Axis],
        size: int, ignore_index: int, smoothing: float, mean: bool,
    ) -> Tensor:  # fmt: skip
        start, stop = vocabulary_range(vocabulary, size)
        x = logits.to(_accumulation(logits.dtype))
        largest = x.amax(-1) if stop > start else x.new_full(target.shape, -math.inf)
        for axis in vocabulary:
            largest = reduced(largest, axis, "max")
        x = x - largest.unsqueeze(-1)
        here = (target >= start) & (target < stop)
        column = (target - start).clamp(0, max(stop - start - 1, 0)).unsqueeze(-1)
        chosen = x.gather(-1, column).squeeze(-1).masked_fill(~here, 0) if stop > start else torch.zeros_like(largest)
        softmax = x.exp()
        sums = torch.stack([softmax.sum(-1), chosen, x.sum(-1) if smoothing else chosen])
        for axis in vocabulary:
            sums = reduced(sums, axis)
        softmax /= sums[0].unsqueeze(-1)
        valid = target != ignore_index
        count = valid.sum()
        for axis in rows if mean else ():
            count = reduced(count, axis)
        losses = sums[0].log() - (1 - smoothing) * sums[1] - (smoothing / size * sums[2] if smoothing else 0)
        ctx.save_for_backward(softmax.to(logits.dtype), column, here, valid, count)
        ctx.options = size, smoothing, mean
        total = losses.masked_fill(~valid, 0).sum()
        return (total / count if mean else total).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        softmax, column, here, valid, count = ctx.saved_tensors
        size, smoothing, mean = ctx.options
        grad = softmax.to(_accumulation(softmax.dtype)) - smoothing / size
        if softmax.shape[-1]:
            grad.scatter_add_(-1, column, (here.to(grad.dtype) * (smoothing - 1)).unsqueeze(-1))
        scale = torch.where(valid, grads[0] / count if mean else grads[0], 0).to(grad.dtype)
        return (grad * scale.unsqueeze(-1)).to(softmax.dtype), *[None] * 7


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def parallel_cross_entropy(
    logits: Tensor, target: Tensor, *, rows: Sequence[Axis], vocabulary: Sequence[Axis], size: int,
    ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Cross entropy of (rows, `size` classes), also (rows, classes, d1, ...): a summand over `rows`, whole over
    `vocabulary`. The mean is over the labels of all devices that are not ignored. Only the local softmax is saved."""
    if logits.dim() > 1:
        logits = logits.movedim(1, -1)
    options = tuple(rows), tuple(vocabulary), size, ignore_index, label_smoothing, reduction == "mean"
    return cast(Tensor, _CrossEntropy.apply(logits, target, *options))


def parallel_mse_loss(input: Tensor, target: Tensor, *, count: int) -> Tensor:
    """This device's summand of the mean squared error over `count` elements of all devices."""
    squares = F.mse_loss(input, target, reduction="none")
    return (squares.sum(dtype=_accumulation(squares.dtype)) / count).to(squares.dtype)


def parallel_mean(input: Tensor, *, dim: Sequence[int] | None, keepdim: bool = False, count: int) -> Tensor:
    """This device's summand of a mean over `count` elements (per result) of all devices."""
    dims = tuple(range(input.dim())) if dim is None or len(dim) == 0 else tuple(dim)
    return (input.sum(dims, keepdim, dtype=_accumulation(input.dtype)) / count).to(input.dtype)
