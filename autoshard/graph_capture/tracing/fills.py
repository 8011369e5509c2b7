"""Makes every tensor that is filled with one number an `aten.full`: nothing depends on whose shape it borrowed.

And of those that are filled by drawing: which of them a forward draws, and which the first call of a module's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_VALUES = {
    "zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1,
    "empty": 0, "empty_like": 0, "new_empty": 0, "zero_": 0, "zero": 0,
}  # fmt: skip
_GIVEN = ("full", "full_like", "new_full", "fill", "fill_")

CHECKPOINTED = {"autoshard_checkpointed": True}  # in the meta of a node's own: backward runs it again
INITIALISERS = ("uniform_", "normal_")  # the methods by which `torch.nn.init` draws
_INITIALISES = "autoshard_initialises"  # in the meta of a node's own: a parameter is drawn


def plain_creation(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Replace fills in place; returns old -> new. functionalise does `zero_` and `fill_`, and asks for their value."""
    instead: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        name = op_name(node)
        if name and not name.endswith("_") and (value := fill_value(node)) is not None:
            with graph.inserting_before(node):
                filled = full(graph, node.meta["val"], value)
            filled.meta = dict(node.meta)
            node.replace_all_uses_with(filled)
            graph.erase_node(node)
            instead[node] = filled
    return instead


def full(graph: fx.Graph, like: torch.Tensor, value: int | float | bool) -> fx.Node:
    """A new `aten.full` node of the shape and dtype of `like`."""
    node = graph.call_function(torch.ops.aten.full.default, (list(like.shape), value), {"dtype": like.dtype})
    node.meta["val"] = like
    return node


def fill_value(node: fx.Node) -> Any:
    """The number that `node` fills a whole tensor with, None if it does not or if that number is a tensor."""
    name = op_name(node)
    if name in _VALUES:
        return _VALUES[name]
    if name in _GIVEN:
        value = node.args[1] if len(node.args) > 1 else node.kwargs.get("fill_value", node.kwargs.get("value"))
        return value if isinstance(value, int | float | bool) else None
    return None


def op_name(node: fx.Node) -> str:
    """`add_` of `aten.add_.Tensor`; "" for what is no ATen operator."""
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""


def initialising(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace one of `INITIALISERS` while a forward is traced, so that `draws` knows what it does to a parameter."""

    def drawn(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_param = isinstance(self, torch.nn.Parameter)
        with fx.traceback.annotate({_INITIALISES: True}) if is_param else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return drawn


def draws(node: fx.Node) -> bool:
    """Random operators of a forward are numbered, read or not; those of a module that its first call makes are not."""
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return drawn and _INITIALISES not in node.meta.get("custom", ())
