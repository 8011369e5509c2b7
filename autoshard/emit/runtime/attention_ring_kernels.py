"""Computation of a ring device on one block of keys and values: torch's fused kernels, or scores as a tensor."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .attention import causal_mask


class Part(NamedTuple):
    """Which queries attend to which keys of a block: queries from `first_row` on, to the first `columns` keys."""

    first_row: int
    columns: int
    shift: int | None = None  # a causal mask: the i-th of these rows sees the columns up to i + shift
    start: int = 0  # the block's place in a mask


class Kernels(Protocol):
    """Attention of the given queries, (queries, d), to a block's (columns, d); both have the same leading dims."""

    def forward(self, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """The output (accumulated in float32) and the logarithms of the sums of its exponentials, (rows, 1)."""

    def backward(
        self, k: Tensor, v: Tensor, part: Part, grad: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the rows, keys and values, from the rows of `grad`, and from `out` and `logsumexp` over all
        blocks."""


class Plain:
    """Scores as a tensor, recomputed in backward."""

    def __init__(self, q: Tensor, scale: float, mask: Tensor | None) -> None:
        self.q, self.scale, self.mask = q, scale, mask
        self.grad_mask: Tensor | None = None  # filled in backward where it is given

    def scores(self, q: Tensor, k: Tensor, part: Part) -> Tensor:
        scores = (q @ k.transpose(-2, -1)).to(accumulation(q.dtype)) * self.scale
        if part.shift is not None:
            seen = causal_mask(part.shift, part.shift + q.shape[-2], 0, part.columns, k.device)
            scores = scores.masked_fill(~seen, -torch.inf)
        if self.mask is not None:
            mask = self.mask[..., part.start : part.start + part.columns]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return scores

    def forward(self, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        scores = self.scores(self.q[..., part.first_row :, :], k, part)
        logsumexp = scores.logsumexp(-1, keepdim=True)
        weights = (scores - logsumexp.masked_fill(logsumexp == -torch.inf, 0)).exp_()  # a row may see nothing here
        return (weights.to(v.dtype) @ v).to(scores.dtype), logsumexp

    def backward(
        self, k: Tensor, v: Tensor, part: Part, grad: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, seen = self.q[..., part.first_row :, :], logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)
        weights = (self.scores(q, k, part) - seen).exp_()
        grad_v = (weights.to(grad.dtype).transpose(-2, -1) @ grad).sum_to_size(v.shape)
        dots = (grad.to(weights.dtype) * out).sum(-1, keepdim=True)
        scores = weights * ((grad @ v.transpose(-2, -1)) - dots)
        if self.grad_mask is not None:
            added = self.grad_mask[..., part.start : part.start + part.columns]
            added += scores.sum_to_size(added.shape)
        scores = (scores * self.scale).to(q.dtype)
        return scores @ k, (scores.transpose(-2, -1) @ q).sum_to_size(k.shape), grad_v


class Flash:
    """torch's fused kernels, which also return the logsumexp: leading dims joined to one, key heads repeated."""

    def __init__(self, q: Tensor, scale: float) -> None:
        self.q, self.scale = q.contiguous(), scale
        name = "_scaled_dot_product_flash_attention" + ("" if q.is_cuda else "_for_cpu")
        self.there, self.back = (getattr(torch.ops.aten, name + end).default for end in ("", "_backward"))

    @staticmethod
    def takes(q: Tensor, v: Tensor) -> bool:
        fast = q.device.type == "cpu" or (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16))
        return fast and q.shape[-1] == v.shape[-1] and q.shape[-1] % (8 if q.is_cuda else 1) == 0 and q.shape[-1] <= 256

    def _heads(self, x: Tensor) -> Tensor:
        wide = x.expand(*self.q.shape[:-2], *x.shape[-2:])
        return wide.reshape(1, math.prod(self.q.shape[:-2]), *x.shape[-2:])

    def _rows(self, part: Part) -> Tensor:
        assert part.shift in (None, 0)
        return self._heads(self.q.narrow(-2, part.first_row, self.q.shape[-2] - part.first_row))

    def forward(self, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        q, causal = self._rows(part), part.shift == 0
        out, logsumexp, *_ = self.there(q, self._heads(k), self._heads(v), 0.0, causal, scale=self.scale)
        before = self.q.shape[:-2]
        wide = out.to(accumulation(out.dtype)).reshape(*before, *out.shape[-2:])
        return wide, logsumexp.reshape(*before, q.shape[-2], 1).to(wide.dtype)

    def backward(
        self, k: Tensor, v: Tensor, part: Part, grad: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, causal, before = self._rows(part), part.shift == 0, self.q.shape[:-2]
        lengths: tuple[Any, ...] = ()
        state: tuple[Tensor, ...] = ()
        if q.is_cuda:  # no sequences of their own, and a state of the generator that without dropout nobody reads
            state = torch.empty(2, dtype=torch.uint64, device=k.device).unbind()
            lengths = None, None, q.shape[-2], k.shape[-2]
        inputs = (self._heads(grad), q, self._heads(k), self._heads(v), self._heads(out))
        sums = logsumexp.reshape(1, -1, q.shape[-2]).contiguous()
        grads = self.back(*inputs, sums, *lengths, 0.0, causal, *state, scale=self.scale)
        return grads[0].reshape(*before, *q.shape[-2:]), *(
            g.reshape(*before, *x.shape[-2:]).sum_to_size(x.shape) for g, x in zip(grads[1:], (k, v), strict=True)
        )


def accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
