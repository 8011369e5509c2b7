"""A functional export graph as a raw Graph: one Op a node, every schema argument by name, nothing simplified."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autoshard.errors import CaptureError
from autoshard.graph_capture.constructor.strided import refuse_sparse
from autoshard.graph_capture.operator_strategies import mark_of
from autoshard.graph_capture.tracing.source_lines import node_quote, node_source
from autoshard.ir.graph import DTYPE_BYTES, Attribute, Op, Tensor
from autoshard.ir.schemas import PLACEMENT

_TENSOR_TYPES = re.compile(r"^(Optional\[)?(List\[)?(Optional\[)?Tensor\]*$")
_LIST_TYPES = re.compile(r"^(Optional\[)?List\[(Optional\[)?Tensor\]*$")
CONSTANT_ELEMENTS = 4096
_VALUES = "express the choice with tensor operations (torch.where), or keep it out of the model"
_ROWS = (
    "rows of one length, and a number for each document in them: F.scaled_dot_product_attention(q, k, v, "
    "attn_mask=(documents[:, None, :, None] == documents[:, None, None, :]) & causal)"
)
_COMPLEX = "its two parts as an input or parameter, torch.view_as_real(z), and torch.view_as_complex in the forward"
_COUNTS = "torch.nn.functional.one_hot(x, COUNT).sum(0), whose size is known"
_SHAPES = "a fixed size with a mask (torch.where), or keep it out of the model"


def translate(
    graph: fx.Graph, name_of: Mapping[fx.Node, str]
) -> tuple[list[Op], dict[str, Tensor], Callable[[fx.Node], str]]:
    """Ops, the tensors they make, and the tensor name of any node. `name_of` names the placeholders."""
    names: dict[fx.Node, Any] = dict(name_of)
    ops: list[Op] = []
    tensors: dict[str, Tensor] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is operator.getitem:
            names[node] = names[node.args[0]][node.args[1]]
            continue
        values = _values(node)
        single = isinstance(node.meta["val"], torch.Tensor)
        results = [node.name] if single else [f"{node.name}_out{i}" for i in range(len(values))]  # `_1` may be a node
        names[node] = results[0] if single else results
        for result, value in zip(results, values, strict=True):
            tensors[result] = tensor_of(result, value, node)
        ops.append(_op(node, names, tuple(results)))
    return ops, tensors, lambda node: str(names[node])


def tensor_of(name: str, value: torch.Tensor, node: fx.Node) -> Tensor:
    """The Tensor that an exported value is; CaptureError where its shape or dtype has no name here."""
    if not all(isinstance(size, int) for size in value.shape):
        hint = _COUNTS if "bincount" in str(node.target) else _SHAPES
        raise CaptureError(f"the shape of a result depends on a tensor's value at {node_quote(node)}", hint)
    dtype = str(value.dtype).removeprefix("torch.")
    place = node.name if node.op == "placeholder" else node_quote(node)
    refuse_sparse(value, place)
    if dtype not in DTYPE_BYTES:
        hint = _COMPLEX if value.dtype.is_complex else f"one of {', '.join(DTYPE_BYTES)}"
        if "varlen_attn" in str(node.target):
            message = "varlen_attn is a kernel of CUDA devices alone, which has no rule by which it could be split"
            raise CaptureError(f"{message}, at {place}", _ROWS)
        raise CaptureError(f"{dtype} tensors are not supported, at {place}", hint)
    return Tensor(name, tuple(value.shape), dtype)


def constant_op(name: str, value: torch.Tensor) -> tuple[Op, Tensor]:
    """A tensor that the forward holds as a literal: `autoshard.constant`, its numbers flat in `values`."""
    if value.numel() > CONSTANT_ELEMENTS:
        raise CaptureError(
            f"the forward holds a literal tensor of shape {tuple(value.shape)}",
            "make it a buffer: self.register_buffer(...)",
        )
    dtype = str(value.dtype).removeprefix("torch.")
    attributes = (("values", tuple(value.flatten().tolist())), ("shape", tuple(value.shape)), ("dtype", dtype))
    return Op(name, "autoshard.constant", (), attributes, (name,)), Tensor(name, tuple(value.shape), dtype)


def _values(node: fx.Node) -> list[torch.Tensor]:
    if not isinstance(node.target, torch._ops.OpOverload):
        name = getattr(node.target, "__name__", str(node.target))
        message = f"the model uses {name}, which can't be captured, at {node_quote(node)}"
        raise CaptureError(message, "plain tensor operations at that line")
    value = node.meta.get("val")
    values = [value] if isinstance(value, torch.Tensor) else value
    if not isinstance(values, tuple | list) or not all(isinstance(item, torch.Tensor) for item in values):
        raise CaptureError(f"the program depends on a tensor's value at {node_quote(node)}", _VALUES)
    return list(values)


def _op(node: fx.Node, names: Mapping[fx.Node, Any], results: tuple[str, ...]) -> Op:
    namespace, _, name = node.target._schema.name.partition("::")
    operands: list[str | None] = []
    attributes: list[tuple[str, Attribute]] = []
    lists = [argument.name for argument in node.target._schema.arguments if _LIST_TYPES.match(str(argument.type))]
    for argument, value in _arguments(node):
        if argument.name in lists[:-1]:
            attributes.append((argument.name, len(value or ())))
        if _TENSOR_TYPES.match(str(argument.type)) and not _is_scalar(value):
            operands += [
                None if n is None else str(names[n]) for n in (value if isinstance(value, list | tuple) else [value])
            ]
        elif argument.name not in PLACEMENT:
            attributes.append((argument.name, _attribute(value, node)))
    return Op(
        node.name,
        f"{namespace}.{name}",
        tuple(operands),
        tuple(attributes),
        results,
        _module(node),
        node_source(node) + mark_of(node.meta),
    )


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    for i, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        yield argument, node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float | bool)


def _attribute(value: Any, node: fx.Node) -> Attribute:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return tuple(_attribute(item, node) for item in value)
    if value is None or type(value) in (int, float, bool, str):
        attribute: Attribute = value
        return attribute
    raise CaptureError(f"an argument of {node.target} depends on a tensor's value at {node_quote(node)}", _VALUES)


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0].partition("@")[0] if stack else ""
