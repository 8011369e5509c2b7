"""torch's optimizers, stepping on local tensors. Parameters and state stay DTensors outside of a step.

Updates are elementwise, so the plain local tensors give the same numbers; DTensor's dispatch of the one fused operator
over all parameters takes longer than the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def _held(value: Tensor | None) -> Tensor | None:
    if not isinstance(value, DTensor):
        return value
    held: Tensor = value._local_tensor  # `to_local` is a node of autograd, and ten times slower
    return held


class _OnLocalTensors:
    """Mixin for an optimizer whose `_init_group` fills lists of parameters, gradients and state for its step."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        result = super()._init_group(group, *lists)  # type: ignore[misc]
        if not group.get("momentum"):  # whose buffers SGD puts back into its state, by what is in the list
            for filled in (entries for entries in lists if isinstance(entries, list)):
                filled[:] = map(_held, filled)
        return result


class AdamW(_OnLocalTensors, torch.optim.AdamW):
    """torch.optim.AdamW on local tensors."""


class SGD(_OnLocalTensors, torch.optim.SGD):
    """torch.optim.SGD on local tensors; with momentum, torch's own step."""
