"""Autograd's view of a parameter: one plain local tensor, its leaf, whose gradient becomes the parameter's.

`DTensor.to_local` adds a node to the graph at every use, and wraps a gradient at every use. The leaf shares the
parameter's memory, so that what optimizers and checkpoints do to the parameter is done to the leaf.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Arrived = Callable[[Tensor], None]


def grow_leaf(tensor: Tensor) -> None:
    """Gives a parameter or buffer its leaf; called once, when it is made."""
    leaf = _held(tensor).detach()
    if isinstance(tensor, nn.Parameter) and (leaf.is_floating_point() or leaf.is_complex()):
        leaf.requires_grad_()
        leaf.register_post_accumulate_grad_hook(partial(_on_gradient, weakref.ref(tensor)))
        leaf.requires_grad_(tensor.requires_grad)
    cast(Any, tensor).leaf = leaf


def local(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Local part that this device holds, reshaped to `shape`; gradients flow to the parameter."""
    leaf: Tensor | None = getattr(tensor, "leaf", None)
    if leaf is not None and torch.compiler.is_compiling():  # a compiled graph has it as an input
        return leaf if shape is None else leaf.reshape(tuple(shape))
    if leaf is not None:
        held = _held(tensor)
        if leaf.data_ptr() != held.data_ptr():  # the parameter was given other memory
            leaf.data = held.detach()
        if leaf.requires_grad != tensor.requires_grad:
            leaf.requires_grad_(tensor.requires_grad)
    else:
        leaf = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if shape is None:
        return leaf
    view = leaf.reshape(tuple(shape))
    cast(Any, view).leaf_of = leaf
    return view


def _held(tensor: Tensor) -> Tensor:
    held: Tensor = getattr(tensor, "_local_tensor", tensor)
    return held


def give_gradients_to(parameter: nn.Parameter, arrived: Arrived | None) -> None:
    """Sets the function that receives the parameter's next gradient (None: the parameter itself)."""
    leaf = getattr(parameter, "leaf", None)
    if leaf is not None:
        leaf.arrived = arrived


def _on_gradient(reference: weakref.ref[nn.Parameter], leaf: Tensor) -> None:
    """Called when backward has made the whole gradient of a leaf."""
    parameter, gradient, leaf.grad = reference(), leaf.grad, None
    if parameter is not None and gradient is not None:
        hand_over(parameter, gradient)


def hand_over(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Passes a gradient from backward to the parameter, or to the function set by `give_gradients_to`."""
    arrived: Arrived | None = getattr(getattr(parameter, "leaf", None), "arrived", None)
    if arrived is not None:
        arrived(gradient)
    elif parameter.grad is None:
        parameter.grad = as_gradient(parameter, gradient)
    else:
        with torch.no_grad():
            local(parameter.grad).add_(gradient)


def as_gradient(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """A local tensor in the form that the parameter's `grad` accepts."""
    if not isinstance(parameter, DTensor):
        return value
    # As DTensor's own operators make it; `from_local` is ten times slower.
    return DTensor(value, parameter._spec, requires_grad=False)
