"""Availability of torch's AdamW kernel that updates a parameter in one pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def has_fused_adamw(parameters: Iterable[Tensor]) -> bool:
    """Can `AdamW(fused=True)` update them all?

    On Ascend only newer versions of torch_npu have the kernel. Their `NpuFusedAdamW` does not suit a package: it joins
    all gradients in a buffer at its first step and uses that from then on, while each step here makes new ones.
    """
    return all(_has_kernel(parameter.device) and parameter.is_floating_point() for parameter in parameters)


def _has_kernel(device: torch.device) -> bool:
    if device.type in ("cpu", "cuda"):
        return True
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return device.type == "npu" and bool(known("aten::_fused_adamw_", "PrivateUse1"))
