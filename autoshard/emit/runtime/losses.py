"""Losses whose rows or classes the mesh shards: means are over all devices, classes are joined.

`rows`: the axes that shard the batch; `vocabulary`: those that shard the classes, each splitting what the previous one
left. Class weights are sharded like the classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import Axis
from .micro_batches import counted_over
from .operators import accumulation, local_index, vocabulary_range
from .redistribution import reduced


class _Options(NamedTuple):
    rows: tuple[Axis, ...]
    vocabulary: tuple[Axis, ...]
    size: int
    ignore_index: int
    smoothing: float
    reduction: str


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy. With p the softmax, w the weights (else 1), W their sum, K classes, e the smoothing, y a row's
    label: loss = (1 - e) w_y (-log p_y) + e/K sum_c w_c (-log p_c); a mean divides by the sum of w_y."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, options: _Options) -> Tensor:
        start, stop = vocabulary_range(options.vocabulary, options.size)
        x = logits.to(accumulation(logits.dtype))
        w = None if weight is None else weight.to(x.dtype)
        largest = x.amax(-1) if stop > start else x.new_full(target.shape, -math.inf)
        for axis in options.vocabulary:
            largest = reduced(largest, axis, "max")
        x = x - largest.unsqueeze(-1)
        column, here = local_index(target, start, stop, options.size, options.ignore_index)
        softmax = x.exp()
        parts = [softmax.sum(-1), _chosen(x, column, here)]
        if options.smoothing:
            parts.append((x if w is None else x * w).sum(-1))
        if w is not None:
            parts += [_chosen(w.expand_as(x), column, here)] + [w.sum().expand_as(largest)] * bool(options.smoothing)
        sums = torch.stack(parts)
        for axis in options.vocabulary:
            sums = reduced(sums, axis)
        softmax /= sums[0].unsqueeze(-1)
        log = sums[0].log()
        valid = target != options.ignore_index
        w_row = torch.ones_like(log) if w is None else sums[2 + bool(options.smoothing)]
        total = sums[-1] if w is not None else torch.full_like(log, float(options.size))
        losses = (1 - options.smoothing) * w_row * (log - sums[1])
        if options.smoothing:
            losses = losses + options.smoothing / options.size * (total * log - sums[2])
        losses = losses.masked_fill(~valid, 0)
        count = w_row.masked_fill(~valid, 0).sum()
        count = counted_over(count, options.rows if options.reduction == "mean" else ())
        scale = (1 - options.smoothing) * w_row + (options.smoothing / options.size * total if options.smoothing else 0)
        ctx.save_for_backward(softmax.to(logits.dtype), column, here, valid, count, w_row, scale, w)
        ctx.options = options
        if options.reduction == "none":
            return losses.to(logits.dtype)
        return (losses.sum() / count if options.reduction == "mean" else losses.sum()).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        softmax, column, here, valid, count, w_row, scale, w = ctx.saved_tensors
        smoothing, size = ctx.options.smoothing, ctx.options.size
        grad = softmax.to(accumulation(softmax.dtype)) * scale.unsqueeze(-1)
        if smoothing:
            grad = grad - smoothing / size * (1 if w is None else w)
        if softmax.shape[-1]:
            grad.scatter_add_(-1, column.unsqueeze(-1), (here.to(w_row.dtype) * (smoothing - 1) * w_row).unsqueeze(-1))
        incoming = grads[0] / count if ctx.options.reduction == "mean" else grads[0]
        incoming = torch.where(valid, incoming, 0).to(grad.dtype)
        return (grad * incoming.unsqueeze(-1)).to(softmax.dtype), None, None, None


def _chosen(x: Tensor, column: Tensor, here: Tensor) -> Tensor:
    """Entries of the last dim at `column`, zero where the label is another device's."""
    if not x.shape[-1]:
        return x.sum(-1)  # zeros that autograd still connects to x
    return x.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)


def _classes_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1) if x.dim() > 1 else x


def parallel_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, rows: Sequence[Axis] = (),
    vocabulary: Sequence[Axis] = (), size: int, ignore_index: int = -100, label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Cross entropy of (rows, `size` classes), also (rows, classes, d1, ...): a partial sum over `rows` (without a
    reduction, each row's loss), whole over `vocabulary`. A mean is over the labels of all devices that are not ignored,
    or over their weights. Only the local softmax is saved, or its logarithm."""
    options = _Options(tuple(rows), tuple(vocabulary), size, ignore_index, label_smoothing, reduction)
    if not vocabulary and logits.dtype == accumulation(logits.dtype):
        return _of_whole_classes(logits, target, weight, options)
    return cast(Tensor, _CrossEntropy.apply(_classes_last(logits), target, weight, options))


def _of_whole_classes(logits: Tensor, target: Tensor, weight: Tensor | None, options: _Options) -> Tensor:
    """Loss by torch's kernels, except for the mean, which would be over this device's labels alone."""
    mean, ignored = options.reduction == "mean", options.ignore_index
    reduction = "sum" if mean else options.reduction
    losses = F.cross_entropy(
        logits, target, weight, ignore_index=ignored, reduction=reduction, label_smoothing=options.smoothing
    )
    if not mean:
        return losses
    valid = target != ignored
    count = valid.sum() if weight is None else weight[target.where(valid, 0)].where(valid, 0).sum()
    return losses / counted_over(count, options.rows)


def parallel_nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, rows: Sequence[Axis] = (),
    vocabulary: Sequence[Axis] = (), size: int, ignore_index: int = -100, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Negative log-likelihood of (rows, `size` classes, ...): a partial sum over `rows` and over `vocabulary`."""
    start, stop = vocabulary_range(vocabulary, size)
    column, here = local_index(target, start, stop, size, ignore_index)
    here, x = here & (target != ignore_index), _classes_last(x)
    w_row = _chosen((x.new_ones(stop - start) if weight is None else weight).expand_as(x), column, here)
    losses = -w_row * _chosen(x, column, here)
    if reduction == "none":
        return losses
    count = w_row.detach().sum(dtype=accumulation(x.dtype))
    count = counted_over(count, (*rows, *vocabulary) if reduction == "mean" else ())
    total = losses.sum(dtype=accumulation(x.dtype))
    return (total / count if reduction == "mean" else total).to(x.dtype)


def parallel_loss(*operands: Tensor | None, loss: str, count: int, **options: Any) -> Tensor:
    """This device's partial sum of the mean of a loss that is one number per element or row, `count` of them on all
    devices. `loss` is ATen's name for it."""
    losses = getattr(torch.ops.aten, loss)(*operands, reduction=0, **options)
    return cast(Tensor, (losses.sum(dtype=accumulation(losses.dtype)) / count).to(losses.dtype))
