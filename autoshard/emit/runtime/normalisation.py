"""Softmax, norms over sharded dims, and batch norm over a sharded batch, with the statistics of the whole tensor.

Means and variances of all devices are combined (Chan, Golub, LeVeque 1983), in one collective per axis: no difference
of large sums is taken, and every device gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .axis import Axis
from .redistribution import reduced


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _moments(x: Tensor, dims: Sequence[int], axes: Sequence[Axis], count: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (of the population) over `dims`, kept as size 1, of the `count` numbers on all devices."""
    variance, mean = torch.var_mean(x, tuple(dims), correction=0, keepdim=True)
    local_count = x.numel() // mean.numel()
    flat = torch.cat([mean.new_tensor([local_count]), mean.reshape(-1), variance.reshape(-1) * local_count])
    for axis in axes:
        parts = axis.transport.all_gather(flat, [len(flat)] * axis.size).view(axis.size, -1)
        counts, (means, squares) = parts[:, :1], parts[:, 1:].chunk(2, 1)
        total = counts.sum(0)
        middle = (counts * means).sum(0) / total
        flat = torch.cat([total, middle, squares.sum(0) + (counts * (means - middle) ** 2).sum(0)])
    middle, squares = flat[1:].chunk(2)
    return middle.view_as(mean), (squares / count).view_as(mean)


def _means(values: Sequence[Tensor], dims: Sequence[int], axes: Sequence[Axis], count: int) -> list[Tensor]:
    """Means over `dims` (kept) of several tensors of one shape, in one collective per axis."""
    sums = torch.stack([value.sum(tuple(dims), keepdim=True) for value in values])
    for axis in axes:
        sums = reduced(sums, axis)
    return list(sums / count)


class _Standardise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps), with the mean and variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: Sequence[int], eps: float, axes: Sequence[Axis], count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = _moments(_wide(x), dims, axes, count)
        scale = (variance + eps).rsqrt()
        y = ((_wide(x) - mean) * scale).to(x.dtype)
        ctx.save_for_backward(y, scale)
        ctx.options = dims, axes, count
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, scale = map(_wide, ctx.saved_tensors)
        grad = _wide(grads[0])
        mean, along = _means([grad, grad * y], *ctx.options)
        grad_x = (grad - mean).sub_(y * along).mul_(scale)
        return grad_x.to(grads[0].dtype), None, None, None, None


class _Rms(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: Sequence[int], eps: float, axes: Sequence[Axis], count: int) -> Tensor:
        wide = _wide(x)
        (square,) = _means([wide * wide], dims, axes, count)
        scale = (square + eps).rsqrt()
        y = (wide * scale).to(x.dtype)
        ctx.save_for_backward(y, scale)
        ctx.options = dims, axes, count
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, scale = map(_wide, ctx.saved_tensors)
        grad = _wide(grads[0])
        (along,) = _means([grad * y], *ctx.options)
        grad_x = (y * along).neg_().add_(grad).mul_(scale)
        return grad_x.to(grads[0].dtype), None, None, None, None


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None and bias is not None:
        return torch.addcmul(bias, x, weight)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def parallel_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, dims: int, count: int,
    eps: float, features: Sequence[Axis],
) -> Tensor:  # fmt: skip
    """Layer norm over the last `dims` dims (`count` numbers), which `features` shard, as well as weight and bias."""
    last = tuple(range(x.dim() - dims, x.dim()))
    return _affine(_Standardise.apply(x, last, eps, tuple(features), count)[0], weight, bias)


def parallel_rms_norm(
    x: Tensor, weight: Tensor | None = None, *, dims: int, count: int, eps: float | None, features: Sequence[Axis]
) -> Tensor:
    """RMS norm over the last `dims` dims (`count` numbers), which `features` shard, as well as the weight."""
    last = tuple(range(x.dim() - dims, x.dim()))
    small = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(cast(Tensor, _Rms.apply(x, last, small, tuple(features), count)), weight, None)


def parallel_group_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, groups: int, count: int,
    eps: float, features: Sequence[Axis],
) -> Tensor:  # fmt: skip
    """Group norm with `groups` groups on this device, each of `count` numbers, which `features` shard."""
    y = _Standardise.apply(x.reshape(len(x), groups, -1), (2,), eps, tuple(features), count)[0]
    shape = (-1, *[1] * (x.dim() - 2))
    weight, bias = (t if t is None else t.view(shape) for t in (weight, bias))
    return _affine(y.view(x.shape), weight, bias)


def synchronised_batch_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, mean: Tensor | None = None,
    variance: Tensor | None = None, *, count: int, momentum: float, eps: float, batch: Sequence[Axis],
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Batch norm by the statistics of all samples and positions (`count` per channel), which `batch` shards.

    With running statistics, also returns their new values, the same on every device. The result has the dtype of `x`,
    whatever that of the weights.
    """
    dims = (0, *range(2, x.dim()))
    y, own_mean, own_variance = _Standardise.apply(x, dims, eps, tuple(batch), count)
    shape = (-1, *[1] * (x.dim() - 2))
    y = _affine(y, *(t if t is None else t.view(shape) for t in (weight, bias))).to(x.dtype)
    if mean is None or variance is None:
        return cast(Tensor, y)
    unbiased = own_variance.flatten() * (count / max(count - 1, 1))
    return y, _moved(mean, own_mean.flatten(), momentum), _moved(variance, unbiased, momentum)


def _moved(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    return (running * (1 - momentum) + new * momentum).to(running.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, log: bool, axes: Sequence[Axis]) -> Tensor:
        wide = _wide(x)
        largest = wide.amax(dim, keepdim=True)
        for axis in axes:
            largest = reduced(largest, axis, "max")
        wide = wide - largest
        powers = wide.exp() if log else wide.exp_()
        total = powers.sum(dim, keepdim=True)
        for axis in axes:
            total = reduced(total, axis)
        y = (wide.sub_(total.log()) if log else powers.div_(total)).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.options = dim, log, axes
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dim, log, axes = ctx.options
        y, grad = _wide(ctx.saved_tensors[0]), _wide(grads[0])
        total = (grad if log else grad * y).sum(dim, keepdim=True)
        for axis in axes:
            total = reduced(total, axis)
        grad_x = grad - y.exp() * total if log else y * (grad - total)
        return grad_x.to(grads[0].dtype), None, None, None


def parallel_softmax(x: Tensor, *, dim: int, classes: Sequence[Axis], dtype: torch.dtype | None = None) -> Tensor:
    """Softmax along a dim that `classes` shard."""
    return cast(Tensor, _Softmax.apply(x if dtype is None else x.to(dtype), dim, False, tuple(classes)))


def parallel_log_softmax(x: Tensor, *, dim: int, classes: Sequence[Axis], dtype: torch.dtype | None = None) -> Tensor:
    """Logarithm of the softmax along a dim that `classes` shard."""
    return cast(Tensor, _Softmax.apply(x if dtype is None else x.to(dtype), dim, True, tuple(classes)))
