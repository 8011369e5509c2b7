"""Modules that hold this rank's parameters and buffers under the names of the original."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.api.parallel.rank_model import RankModel, stored
from autoshard.emit.runtime import assign, sharding
from autoshard.errors import UsageError


class HeldModule(nn.Module):
    """A module whose parameters and buffers may be this rank's parts; as nn.Module until they are."""

    # Stores, names and tensors that the rank's model runs on, and whether they were planned with gradients.
    _held: Sequence[tuple[dict[str, Any], str, Any, bool]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        """Warns of a new attribute: the plan has the model's values."""
        if self._held and not (name.startswith("_") or hasattr(self, name)):
            message = f"{name} has no effect on a sharded model, which runs with the attributes it was planned with"
            warnings.warn(message, UserWarning, stacklevel=2)
        super().__setattr__(name, value)

    def check_held(self) -> None:
        """UsageError for what the rank's model would not see: replaced parameters and buffers, hooks on parameters,
        parameters that were unfrozen."""
        for store, name, tensor, trained in self._held:
            current: Any = store.get(name)
            if current is not tensor:
                message = f"{name}, a parameter or buffer of a sharded model, was replaced, by functional_call or by a "
                message += "parametrization, and the plan would run on the old one"
                raise UsageError(message, "change values in place, under torch.no_grad(); parametrize before planning")
            if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                message = f"{name}, a parameter of a sharded model, has a hook, and its gradient is not autograd's"
                raise UsageError(message, "change the gradient after the backward")
            if tensor.requires_grad and not trained:
                message = f"{name} was frozen when the model was planned: its gradient would not be summed over devices"
                raise UsageError(message, "unfreeze it before planning")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes whole tensors, which every rank gives, as well as parts; the last argument are the errors."""
        for name, held in (*self._parameters.items(), *self._buffers.items()):
            whole = state_dict.get(prefix + name)
            if not isinstance(held, DTensor) or not isinstance(whole, Tensor) or isinstance(whole, DTensor):
                continue
            whole = torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole
            if tuple(whole.shape) == sharding(held).shape:
                assign(held, whole)
            else:
                args[-1].append(f"{prefix}{name}: expected shape {sharding(held).shape}, got {tuple(whole.shape)}")
            state_dict[prefix + name] = held
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """UsageError for another dtype or device than the plan's; before parameters are parts, as nn.Module."""
        parts = [x for x in (*self.parameters(), *self.buffers()) if isinstance(x, DTensor)]
        if not parts:
            return cast(Self, super()._apply(fn, recurse))
        for dtype, device in {(x.dtype, x.device): None for x in parts}:
            other = fn(torch.empty(0, dtype=dtype, device=device))
            if (other.dtype, other.device) != (dtype, device):
                message = f"parameters of a sharded model are {dtype} on {device}, not {other.dtype} on {other.device}"
                raise UsageError(message, "precision=… of the plan, device=… of parallelize or shard")
        return self


class _Holder(HeldModule):
    """Parameters and buffers under the names of the original."""

    def forward(self) -> None:
        raise UsageError("a part of a parallelised model can't be called by itself", "call the whole model")


def owner_of(holder: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module below `holder`, made where there is none, and the name in it, of a parameter's path."""
    *folders, name = path.split(".")
    owner = holder
    for folder in folders:
        child = owner._modules.get(folder)
        if child is None:
            child = owner._modules[folder] = _Holder().train(owner.training)
        owner = child
    return owner, name


def hold(holder: nn.Module, path: str, tensor: Tensor, persistent: bool = True) -> None:
    """Registers a tensor under its name in the original, whatever attributes `holder` has: state dicts have it."""
    owner, name = owner_of(holder, path)
    if isinstance(tensor, nn.Parameter):
        owner._parameters[name] = tensor
    else:
        owner._buffers[name] = tensor
        if not persistent:
            owner._non_persistent_buffers_set.add(name)


def register(holder: HeldModule, part: RankModel) -> None:
    """Registers each parameter and buffer of the rank's model under each of its original names."""
    held = {sharding(x).name: x for x in (*part.module.parameters(), *part.module.buffers())}
    for one, _ in stored(part.program):
        for path in (one.path, *one.ties):
            hold(holder, path, held[one.path], one.persistent)
    stores = [store for module in holder.modules() for store in (module._parameters, module._buffers)]
    named = [(store, name, x) for store in stores for name, x in store.items() if x is not None]
    holder._held = [(store, name, x, x.requires_grad) for store, name, x in named]
