"""A program traced with dynamic sizes, at given ones: every symbol is a number, and nothing is traced again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.errors import CaptureError
from autoshard.graph_capture.dynamic_sizes.sequence_inputs import sequence_dims
from autoshard.ir.dynamic import DynamicSize

_Values = dict[Any, int]  # of torch's symbols


def concrete(program: Any, dims: Mapping[str, tuple[tuple[str, int], int]]) -> Any:
    """`program` with all that a capture reads of it, at these sizes. `dims`: by size, (placeholder, dim) and its size.

    CaptureError where the trace holds an expression that is no number at them.
    """
    module = _copied(program.graph_module)
    values = _values(module.graph, dims)
    _fold(module, values, {})
    module.graph.lint()
    return SimpleNamespace(
        graph_module=module, graph=module.graph, graph_signature=program.graph_signature,
        call_spec=program.call_spec, state_dict=program.state_dict, constants=program.constants,
    )  # fmt: skip


def places_at(sizes: Sequence[DynamicSize], point: Sequence[int]) -> dict[str, tuple[tuple[str, int], int]]:
    """First dim of each size, and the size at this point, by name."""
    return {dynamic.name: (dynamic.dims[0], size) for dynamic, size in zip(sizes, point, strict=True)}


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Copy of the module with separate graphs, also in submodules of regions; tensors are shared."""
    copied = fx.GraphModule(module, fx.Graph())
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, copies, return_output_node=True)
    if output is not None:
        value, old = output
        node = graph.output(value, type_expr=getattr(old, "type", None))
        node.meta = dict(old.meta)
    for original, copy in copies.items():  # a copy of an input that is called `input` or `len` is `input_1`
        copy.name, copy.meta = original.name, dict(copy.meta)
    copied.graph = graph
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copied(child))
    return copied


def _values(graph: fx.Graph, dims: Mapping[str, tuple[tuple[str, int], int]]) -> _Values:
    """Value of each of torch's symbols. CaptureError if the model fixes one of the sizes."""
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    values: _Values = {}
    for name, ((placeholder, dim), size) in dims.items():
        shown = nodes[placeholder].meta["val"].shape[dim]
        symbols = list(shown.node.expr.free_symbols) if isinstance(shown, torch.SymInt) else []
        if not symbols:
            message = f"{name} can't be dynamic: the model fixes dim {dim} of {placeholder} to {shown}"
            raise CaptureError(message, "leave this size out of the dynamic ones")
        (symbol,), expression = symbols, shown.node.expr
        slope, offset = expression.expand().coeff(symbol, 1), expression.subs(symbol, 0)
        values[symbol] = (size - int(offset)) // int(slope)
    return values


def _fold(module: fx.GraphModule, values: _Values, known: dict[Any, int]) -> None:
    """Replace symbols by numbers, in place."""
    numbers: dict[fx.Node, Any] = {}
    for node in list(module.graph.nodes):
        value = node.meta.get("val")
        if numbers:
            node.args = fx.map_arg(node.args, lambda arg: numbers.get(arg, arg))
            node.kwargs = fx.map_arg(node.kwargs, lambda arg: numbers.get(arg, arg))
        if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
            numbers[node] = _number(value, values, known)
        elif value is not None:
            node.meta["val"] = torch.utils._pytree.tree_map_only(
                (torch.Tensor, torch.SymInt), lambda leaf: _concrete_value(leaf, values, known), value
            )
    for node in reversed(list(module.graph.nodes)):
        dead = node in numbers or str(node.target).startswith(("aten._assert_scalar", "aten.sym_constrain_range"))
        if dead and not node.users and node.op == "call_function":
            module.graph.erase_node(node)
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            _fold(child, values, known)


def _concrete_value(value: Any, values: _Values, known: dict[Any, int]) -> Any:
    if isinstance(value, torch.SymInt):
        return _number(value, values, known)
    if not isinstance(value, FakeTensor):
        return value
    shape = [_number(size, values, known) for size in value.shape]
    strides = [_number(size, values, known) for size in value.stride()] if value.layout == torch.strided else None
    if all(isinstance(size, int) and not isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        return value
    with value.fake_mode, torch.no_grad():
        tensor = torch.empty_strided(shape, strides or [], dtype=value.dtype, device=value.device)
    return tensor.requires_grad_(value.requires_grad and value.is_leaf and value.dtype.is_floating_point)


def _number(value: Any, values: _Values, known: dict[Any, int]) -> Any:
    """Number for a size or an expression of sizes; others stay. CaptureError if the inputs' sizes don't give it."""
    if not isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
        return value
    expression = value.node.expr
    if expression not in known:
        known[expression] = expression.subs(values)
    number = known[expression]
    if getattr(number, "free_symbols", None):
        raise CaptureError(f"a size of the trace, {expression}, does not follow from the inputs' sizes", "other sizes")
    if isinstance(value, torch.SymBool):
        return bool(number)
    return float(number) if isinstance(value, torch.SymFloat) else int(number)


def with_sizes(examples: Sequence[Tensor], samples: int, length: int) -> tuple[Tensor, ...]:
    """Examples with `samples` in place of their own, and sequences of `length`; 0 if they have no sequences."""
    heads = [x.shape[0] for x in examples if x.dim()]
    batched = with_samples(examples, max(heads, key=heads.count, default=0), samples)
    return with_length(batched, length) if length else batched


def with_samples(examples: Sequence[Tensor], batch: int, count: int) -> tuple[Tensor, ...]:
    """Resize examples whose dim 0 is `batch` to `count` samples: their own, repeated, in the same order in memory."""
    return tuple(resized(x, 0, count) if x.shape[:1] == (batch,) else x for x in examples)


def with_length(examples: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """Resize the sequence dims of examples to `count`, repeating their own values."""
    _, dims = sequence_dims([tuple(x.shape) for x in examples], [x.dtype.is_floating_point for x in examples])
    lengthened = []
    for x, x_dims in zip(examples, dims, strict=True):
        for dim in x_dims:
            x = resized(x, dim, count)
        lengthened.append(x)
    return tuple(lengthened)


def resized(example: Tensor, dim: int, count: int) -> Tensor:
    if example.stride(dim) == 0:
        sizes = [count if axis == dim else size for axis, size in enumerate(example.shape)]
        return example.narrow(dim, 0, 1).expand(sizes)
    order = sorted(range(example.dim()), key=lambda axis: -example.stride(axis))
    back = [order.index(axis) for axis in range(example.dim())]
    picked = torch.arange(count, device=example.device) % example.shape[dim]
    tiled = example.detach().permute(order).index_select(order.index(dim), picked).permute(back)
    return tiled.requires_grad_(example.requires_grad)
