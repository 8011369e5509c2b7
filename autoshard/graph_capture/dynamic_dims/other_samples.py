"""Example inputs with another number of samples or another length, for the same model captured there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.graph_capture.dynamic.sequence_inputs import sequence_dims


def with_sizes(examples: Sequence[Tensor], samples: int, length: int) -> tuple[Tensor, ...]:
    """With `samples` in place of their own, and sequences of `length`; of none where they have none."""
    heads = [x.shape[0] for x in examples if x.dim()]
    made = with_samples(examples, max(heads, key=heads.count, default=0), samples)
    return with_length(made, length) if length else made


def with_samples(examples: Sequence[Tensor], own: int, count: int) -> tuple[Tensor, ...]:
    """Those whose dim 0 has `own` samples get `count`, the same ones over and over, in the same order in memory."""
    return tuple(resized(x, 0, count) if x.shape[:1] == (own,) else x for x in examples)


def with_length(examples: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """Those with sequences get some of `count`, their own over and over."""
    _, dims = sequence_dims([tuple(x.shape) for x in examples], [x.dtype.is_floating_point for x in examples])
    made = []
    for x, own in zip(examples, dims, strict=True):
        for dim in own:
            x = resized(x, dim, count)
        made.append(x)
    return tuple(made)


def resized(example: Tensor, dim: int, count: int) -> Tensor:
    if example.stride(dim) == 0:
        sizes = [count if own == dim else size for own, size in enumerate(example.shape)]
        return example.narrow(dim, 0, 1).expand(sizes)
    order = sorted(range(example.dim()), key=lambda own: -example.stride(own))
    back = [order.index(own) for own in range(example.dim())]
    picked = torch.arange(count, device=example.device) % example.shape[dim]
    made = example.detach().permute(order).index_select(order.index(dim), picked).permute(back)
    return made.requires_grad_(example.requires_grad)
