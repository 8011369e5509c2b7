"""Inlines the regions that torch.export wraps (`torch.no_grad()`, `torch.autocast`) into the graph around them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.fills import op_name
from autoshard.graph_capture.tracing.source_lines import node_quote


def inline(module: fx.GraphModule) -> None:
    """Inline, in place. Inputs of a no-grad region are detached, so that the flat graph has the same gradients."""
    _know_readers(module.graph)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and str(node.target) in _REGIONS:
            start = _REGIONS[str(node.target)]
            inner = getattr(module, node.args[start].target)
            if str(node.target) == _AUTOCAST and node.args[2]:
                _refuse_autocast(inner)
            if str(node.target) == _AUTOCAST:
                for each in inner.graph.nodes:
                    each.meta[AUTOCAST_OFF] = True
            _splice(module, node, inner, node.args[start + 1 :], _detaches(node))


def _know_readers(graph: fx.Graph) -> None:
    """Make every node a user of what it reads: torch.export forgets this for an operand that a region frees."""
    for node in graph.nodes:
        for read in node.all_input_nodes:
            read.users.setdefault(node)


def _refuse_autocast(inner: fx.GraphModule) -> None:
    first = next((node for node in inner.graph.nodes if node.meta.get("stack_trace")), None)
    place = f", around {node_quote(first)}" if first else ""
    raise CaptureError(f"the forward turns autocast on{place}", "leave it out and plan with --precision bf16-mixed")


_AUTOCAST = "wrap_with_autocast"
AUTOCAST_OFF = "autoshard_autocast_off"  # in the meta of nodes that a forward computes with autocast turned off
# Where the inner graph stands in the arguments.
_REGIONS = {"wrap_with_set_grad_enabled": 1, _AUTOCAST: 4}


def _detaches(node: fx.Node) -> bool:
    return str(node.target) == "wrap_with_set_grad_enabled" and not node.args[0]


def _splice(outer: fx.GraphModule, call: fx.Node, inner: fx.GraphModule, operands: Any, detach: bool) -> None:
    inline(inner)
    mapping: dict[fx.Node, Any] = {}
    values = iter(operands)
    passed: dict[fx.Node, Any] = {}  # what is returned as it came, or written in place, is the outer tensor itself
    with outer.graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                passed[node] = next(values)
                mapping[node] = _entering(outer.graph, passed[node], detach)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], lambda n: passed.get(_written(n), mapping[n]))
            else:
                mapping[node] = outer.graph.node_copy(node, lambda n: mapping[n])
    _replace_results(call, results)
    outer.graph.erase_node(call)


def _written(node: fx.Node) -> fx.Node:
    """The node whose tensor `node` is, changed in place."""
    while op_name(node).endswith("_") and node.target._schema.is_mutable:
        node = node.args[0]
    return node


def _entering(graph: fx.Graph, value: Any, detach: bool) -> Any:
    if not detach or not isinstance(value, fx.Node):
        return value
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node


def _replace_results(call: fx.Node, results: Any) -> None:
    if not isinstance(results, tuple | list):
        call.replace_all_uses_with(results)
        return
    for user in list(call.users):
        assert user.target is operator.getitem, user
        user.replace_all_uses_with(results[user.args[1]])
        user.graph.erase_node(user)
