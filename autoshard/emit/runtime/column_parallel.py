"""Linears whose weight is sharded along its outputs. Their input's gradient is a sum over the axis, which overlaps the
computation of the gradients of weight and bias.

(Megatron-LM: `linear_with_grad_accumulation_and_async_allreduce`.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import Axis, Unit
from .float8 import Float8Products, fits, float8_linear
from .kept_collectives import reused_result
from .redistribution import Cut, all_gather, copy, cut_of, gather_whole, start_scatter


def column_parallel(
    x: Tensor, axis: Axis, weight: Tensor, bias: Tensor | None = None, *,
    dim: int | None = None, size: int | None = None, blocks: int = 1, unit: Unit = 1, float8: bool = False,
    kept: bool = False,
) -> Tensor:  # fmt: skip
    """`F.linear(x, weight, bias)`, whose gradient for `x` is summed over `axis`: R -> R+ of `x`. With `dim` each device
    holds a shard of that dim: it is gathered, and its gradient scattered: S -> R+ (`size` to `unit`, and `kept`, as in
    `all_gather`). `float8`: products as in `float8_linear`."""
    linear, products = (float8_linear, _float8_products) if float8 else (F.linear, _products)
    if _decided_elsewhere(x):
        return linear(_moved(x, axis, dim, size, blocks, unit, kept), weight, bias)
    cut = None if dim is None else cut_of(x, axis, dim, size, blocks, unit, whole=False)
    gather = _reused_whole if kept else gather_whole
    return cast(Tensor, _kind(float8).apply(x, weight, bias, axis, cut, False, linear, products, gather))


def shared_column_parallel(
    x: Tensor, axis: Axis, weight: Tensor, bias: Tensor | None = None, *,
    dim: int | None = None, size: int | None = None, blocks: int = 1, unit: Unit = 1, float8: bool = False,
    kept: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns `x` for its other readers, then the result: each reader adds its part to the gradient of `x` first."""
    linear, products = (float8_linear, _float8_products) if float8 else (F.linear, _products)
    if _decided_elsewhere(x):
        whole = _moved(x, axis, dim, size, blocks, unit, kept)
        return whole, linear(whole, weight, bias)
    cut = None if dim is None else cut_of(x, axis, dim, size, blocks, unit, whole=False)
    gather = _reused_whole if kept else gather_whole
    results = _kind(float8).apply(x, weight, bias, axis, cut, True, linear, products, gather)
    return cast("tuple[Tensor, Tensor]", results)


def _decided_elsewhere(x: Tensor) -> bool:
    """Does autocast decide the precision of each operator? It does not support the meta device."""
    return x.device.type != "meta" and bool(torch.is_autocast_enabled(x.device.type))


def _moved(x: Tensor, axis: Axis, dim: int | None, size: int | None, blocks: int, unit: Unit, kept: bool) -> Tensor:
    if dim is None:
        return copy(x, axis)
    return all_gather(x, axis, dim, size=size, blocks=blocks, unit=unit, grad="reduce_scatter", kept=kept)


def _kind(float8: bool) -> type[_Linear]:
    """The function class; traces distinguish the two by name."""
    return _Float8Linear if float8 else _Linear


class Products:
    """Products of a linear's backward: `gradient` (rows, outputs) of its result, `x` (rows, inputs) and `weight`
    (outputs, inputs). The weight's gradient has the weight's memory order: autograd would copy one of another order."""

    def __init__(self, gradient: Tensor, x: Tensor, weight: Tensor) -> None:
        self.gradient, self.x, self.weight = gradient, x, weight

    def of_input(self, others: Tensor | None = None) -> Tensor:
        """The input's gradient, plus what its other readers add."""
        return self.gradient @ self.weight if others is None else torch.addmm(others, self.gradient, self.weight)

    def of_weight(self) -> Tensor:
        if self.weight.is_contiguous():
            return self.gradient.t() @ self.x
        return (self.x.t() @ self.gradient).t()


def _products(x: Tensor, weight: Tensor) -> type[Products]:
    """Products class for the backward of `F.linear`."""
    return Products


def _float8_products(x: Tensor, weight: Tensor) -> type[Products | Float8Products]:
    """Products class for the backward of `float8_linear` with these operands."""
    return Float8Products if fits(x, weight) else Products


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        cut: Cut | None,
        shared: bool,
        linear: Callable[..., Tensor],
        products: Callable[..., Any],
        gather: Callable[[Tensor, Axis, Cut], Tensor],
    ) -> Tensor | tuple[Tensor, Tensor]:
        whole = x if cut is None else gather(x, axis, cut)
        ctx.save_for_backward(whole, weight)
        ctx.axis, ctx.cut, ctx.products = axis, cut, products(whole, weight)
        result = linear(whole, weight, bias)
        return (whole.view_as(whole), result) if shared else result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        inputs, rows = x.reshape(-1, x.shape[-1]), grads[-1].reshape(-1, weight.shape[0])
        products, wait = ctx.products(rows, inputs, weight), None
        if ctx.needs_input_grad[0]:
            others = grads[0].reshape(inputs.shape) if len(grads) > 1 else None
            summed = products.of_input(others)
            wait = _start_sum(summed.view(x.shape), ctx.axis, ctx.cut)
            del summed  # a scatter sends a copy
        of_weight = products.of_weight() if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return wait and wait(), of_weight, of_bias, None, None, None, None, None, None


class _Float8Linear(_Linear):
    pass


def _reused_whole(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    return reused_result(partial(gather_whole, axis=axis, cut=cut), x)


def _start_sum(grad: Tensor, axis: Axis, cut: Cut | None) -> Callable[[], Tensor]:
    if cut is not None:
        return start_scatter(grad, axis, cut)
    done = axis.transport.all_reduce(grad)

    def wait() -> Tensor:
        done()
        return grad

    return wait
