"""Optimizers that were made before a module was sharded: their parameters are replaced by this rank's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autoshard.errors import UsageError

_PARTS: Any = WeakIdKeyDictionary()  # whole parameter -> what stands for it now
_HOOKED: list[Any] = []


def stand_in(parts: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Gives each optimizer that has one of the whole parameters its part instead, from the next step on."""
    for whole, part in parts.items():
        _PARTS[whole] = part
    if not _HOOKED:
        _HOOKED.append(register_optimizer_step_pre_hook(_exchange))


def _exchange(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            part = _PARTS.get(parameter)
            if part is None:
                continue
            if optimizer.state.get(parameter):
                what = "an optimizer has stepped with parameters before they were split over the devices"
                raise UsageError(what, "call the sharded module once before the first step")
            optimizer.state.pop(parameter, None)
            group["params"][position] = part
