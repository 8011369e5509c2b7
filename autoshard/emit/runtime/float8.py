"""Linears whose three products are computed in float8, as torchao's `Float8Linear` does by default.

Each factor has one scale, recomputed from its largest element (dynamic scaling, one scale per tensor): input and weight
are cast to e4m3 (3 bits of mantissa, up to 448), the incoming gradient to e5m2 (2 bits, up to 57344). Products are
summed in float32 and returned in bfloat16. The bfloat16 factors are kept for backward, and cast again there.

A device scales what it holds: a shard has its own scale, which needs no collective and is never coarser than one scale
of the whole tensor, whose largest element is at least the shard's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT = 16  # the kernels take matrices whose dims are its multiples
LEAST = 1e-12  # zeros are divided by more than zero, as in torchao


def formats() -> tuple[torch.dtype, torch.dtype]:
    """Formats of factors and of gradients: e4m3 and e5m2. AMD's MI300 has its own forms, without negative zero."""
    if torch.version.hip and "gfx94" in torch.cuda.get_device_properties(0).gcnArchName:
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` in float8, if these are bfloat16 and all three dims fit the kernels."""
    return cast(Tensor, _Float8Linear.apply(x, weight, bias)) if fits(x, weight) else F.linear(x, weight, bias)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Do the kernels accept these operands?"""
    rows = x.numel() // max(1, x.shape[-1])
    return x.dtype == torch.bfloat16 and all(n and n % UNIT == 0 for n in (rows, *weight.shape))


@dataclass(frozen=True)
class Scaled:
    """A matrix: `values * scale`."""

    values: Tensor
    scale: Tensor

    def t(self) -> Scaled:
        return Scaled(self.values.t(), self.scale)


def scaled(x: Tensor, *, gradient: bool = False) -> Scaled:
    """`x` scaled so that its largest element becomes the largest of the format."""
    dtype = formats()[gradient]
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)  # one pass, nothing written
    scale = largest.clamp(min=LEAST) / torch.finfo(dtype).max
    return Scaled((x / scale).to(dtype), scale)


def product(left: Scaled, right: Scaled, bias: Tensor | None = None, *, fast: bool = False) -> Tensor:
    """`left @ right + bias` in bfloat16. The kernels need contiguous rows of `left` and contiguous columns of `right`.
    `fast`: sums with fewer bits, as torchao does in forward only."""
    return torch._scaled_mm(
        left.values.contiguous(), right.values.t().contiguous().t(), scale_a=left.scale, scale_b=right.scale,
        bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast,
    )  # fmt: skip


class Float8Products:
    """Products of a linear's backward in float8; interface of `column_parallel.Products`."""

    def __init__(self, gradient: Tensor, x: Tensor, weight: Tensor) -> None:
        self.gradient, self.x, self.weight = scaled(gradient, gradient=True), x, weight

    def of_input(self, others: Tensor | None = None) -> Tensor:
        grad = product(self.gradient, scaled(self.weight))
        return grad if others is None else grad.add_(others)

    def of_weight(self) -> Tensor:
        x = scaled(self.x)
        if self.weight.is_contiguous():
            return product(self.gradient.t(), x)
        return product(x.t(), self.gradient).t()


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = scaled(x.reshape(-1, x.shape[-1]))
        output = product(rows, scaled(weight).t(), bias, fast=True)
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grads[0].reshape(-1, weight.shape[0])
        products = Float8Products(rows, x.reshape(-1, x.shape[-1]), weight)
        of_x = products.of_input().view(x.shape) if ctx.needs_input_grad[0] else None
        of_weight = products.of_weight() if ctx.needs_input_grad[1] else None
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
