"""Makes every tensor that is filled with one number an `aten.full`: nothing depends on whose shape it borrowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_VALUES = {
    "zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1,
    "empty": 0, "empty_like": 0, "new_empty": 0, "zero_": 0, "zero": 0,
}  # fmt: skip
_GIVEN = ("full", "full_like", "new_full", "fill", "fill_")


def plain_creation(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """In place; what stands for what. `zero_` and `fill_` are left to functionalise, which asks for their value."""
    instead: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        name = op_name(node)
        if name and not name.endswith("_") and (value := fill_value(node)) is not None:
            with graph.inserting_before(node):
                made = full(graph, node.meta["val"], value)
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            instead[node] = made
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
