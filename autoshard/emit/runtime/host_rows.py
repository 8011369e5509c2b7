"""Look-ups on the host: ids are sent to its memory, which holds the table; rows return, and gradients are sent back.

The host waits for what it needs from the device, but not for what it sends to it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

HOST = torch.device("cpu")


def to_host(x: Tensor) -> Tensor:
    """`x` in host memory, once the copy is complete; the result records what it is a copy of."""
    if x.device == HOST:
        return x
    copied = x.to(HOST)
    cast(Any, copied).on_device = x
    return copied


def to_device(rows: Tensor, device: torch.device) -> Tensor:
    """Rows on the device; backward brings the gradient to the host."""
    return rows if rows.device == device else _ToDevice.apply(rows, device)


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, device: torch.device) -> Tensor:
        return _pinned(rows, device).to(device, non_blocking=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(HOST), None


def _pinned(rows: Tensor, device: torch.device) -> Tensor:
    """Rows in pinned memory, from which CUDA copies asynchronously; torch caches this memory for the next time."""
    return rows.pin_memory() if device.type == "cuda" and torch.cuda.is_available() else rows
