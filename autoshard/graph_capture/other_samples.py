"""Example inputs with another number of samples, for the same model captured at another batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def with_samples(examples: Sequence[Tensor], own: int, count: int) -> tuple[Tensor, ...]:
    """Those whose dim 0 has `own` samples get `count`, the same ones over and over, in the same order in memory."""
    return tuple(_with_samples(x, count) if x.shape[:1] == (own,) else x for x in examples)


def _with_samples(example: Tensor, count: int) -> Tensor:
    if example.stride(0) == 0:
        return example[:1].expand(count, *example.shape[1:])
    order = sorted(range(example.dim()), key=lambda dim: -example.stride(dim))
    back = [order.index(dim) for dim in range(example.dim())]
    samples = torch.arange(count, device=example.device) % len(example)
    made = example.detach().permute(order).index_select(order.index(0), samples).permute(back)
    return made.requires_grad_(example.requires_grad)
