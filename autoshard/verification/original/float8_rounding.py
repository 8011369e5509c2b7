"""Linear layers of the original in float8, if a package's are: written from the formats, not with its runtime.

The factors of each product are rounded to the format and multiplied in float64. A package's shards have separate
scales, so its elements round otherwise, but no further: a package may differ by as much as the original differs from
the exact values, at most half a unit of each factor (2^-4 of it in e4m3, 2^-3 in e5m2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from autoshard.ir.graph import CAST, Graph
from autoshard.rules.algebra.float8_products import IN_FLOAT8, UNIT

# operands, as the operator has them, to input, weight (outputs, inputs) and bias
_OPERANDS: Mapping[str, Callable[..., tuple[Tensor, Tensor, Tensor | None]]] = {
    "aten.linear": lambda x, weight, bias=None: (x, weight, bias),
    "aten.addmm": lambda bias, x, weight: (x, weight.t(), bias),
    "aten.mm": lambda x, weight: (x, weight.t(), None),
    "aten.matmul": lambda x, weight: (x, weight.t() if weight.dim() == 2 else weight, None),
}


def float8_parameters(graph: Graph) -> frozenset[str]:
    """Paths of the parameters that float8 linears multiply by."""
    casts = {op.results[0]: op.operands[0] for op in graph.ops if op.target == CAST}
    read = {op.operands[1] for op in graph.ops if op.target in IN_FLOAT8.values()}
    weights = {casts.get(name or "", name) for name in read}
    return frozenset(path for p in graph.parameters if p.tensor in weights for path in (p.path, *p.ties))


def storages(module: torch.nn.Module, paths: frozenset[str]) -> frozenset[int]:
    """Addresses of the current storages of the parameters at `paths`."""
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(p.untyped_storage().data_ptr() for path, p in named if path in paths)


def in_float8(target: str, inputs: Any, cast_to_low: Any, weights: frozenset[int]) -> Tensor | None:
    """Product of operands `inputs`, cast to bfloat16 in `cast_to_low`; None if it uses none of `weights`."""
    if target not in _OPERANDS or not weights:
        return None
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if not any(x.untyped_storage().data_ptr() in weights for x in tensors):
        return None
    x, weight, bias = _OPERANDS[target](*cast_to_low)
    fits = weight.dim() == 2 and all(n and n % UNIT == 0 for n in (x.numel() // x.shape[-1], *weight.shape))
    return cast(Tensor, _Rounded.apply(x, weight, bias)) if fits else None


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values of `x`, rounded to the format times one scale, by which the largest is the format's largest."""
    wide, most = x.double(), torch.finfo(dtype).max
    largest = wide.abs().max().clamp(min=1e-12)
    return (wide * most / largest).clamp(-most, most).to(dtype).double() * largest / most


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        product = rounded(x, torch.float8_e4m3fn) @ rounded(weight, torch.float8_e4m3fn).t()
        return (product if bias is None else product + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, gradient = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, weight.shape[0])
        factor = rounded(gradient, torch.float8_e5m2)
        of_x = (factor @ rounded(weight, torch.float8_e4m3fn)).to(x.dtype).view(x.shape)
        of_weight = (factor.t() @ rounded(rows, torch.float8_e4m3fn)).to(weight.dtype)
        return of_x, of_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None
