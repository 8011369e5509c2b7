"""The rotation in rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate_half(x: Tensor) -> Tensor:
    """(-second half, first half) of the last dim. Its gradient takes two operators, not those of each slice."""
    turned: Tensor = _RotateHalf.apply(x)
    return turned


class _RotateHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        first, second = gradient.chunk(2, -1)
        return torch.cat([second, -first], -1)
