"""What a forward computes from sizes alone: evaluated to recognise an attention mask that is exactly the causal one."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autoshard.graph_capture.tracing.fills import op_name

LARGEST_ELEMENTS = 1 << 26
_COMPRESS_ELEMENTS = 1 << 22
_POINTWISE = ("__and__", "__or__", "where", "masked_fill", "to", "clone", "contiguous")  # torch does not tag these
_MAY_COPY = ("reshape", "flatten")


def recognise_masks(graph: fx.Graph, values: dict[fx.Node, torch.Tensor]) -> None:
    """In place: attention whose mask is causal becomes `is_causal`, one that hides nothing is dropped.

    `values` are the graph's real constants by placeholder.
    """
    constants = Constants(graph, values)
    verdicts: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if op_name(node) == "scaled_dot_product_attention" and len(node.args) > 3 and isinstance(node.args[3], fx.Node):
            mask = node.args[3]
            if mask not in verdicts:
                verdicts[mask] = _kind(constants.value(mask), node.args[0].meta["val"].shape[-2])
            _apply(node, verdicts[mask])


def _apply(node: fx.Node, verdict: str) -> None:
    if verdict == "other":
        return
    query, key, value, _, dropout, causal = [*node.args, 0.0, False][:6] if len(node.args) < 6 else node.args
    kwargs = dict(node.kwargs)
    dropout, causal = kwargs.pop("dropout_p", dropout), kwargs.pop("is_causal", causal)
    if not causal:
        node.args = (query, key, value, None, dropout, verdict == "causal")
        node.kwargs = kwargs


def _kind(mask: torch.Tensor | None, queries: int) -> str:
    """ "causal", "everything" or "other", from the values of a mask (..., queries, keys)."""
    if mask is None:
        return "other"
    mask = _narrow(mask, {d for d in range(mask.dim() - 2) if mask.stride(d) == 0})
    visible = _visible(mask)
    if visible is None:
        return "other"
    if bool(visible.all()):
        return "everything"
    size = mask.shape[-1]
    return "causal" if bool((visible == torch.ones(queries, size, dtype=torch.bool).tril()).all()) else "other"


def _visible(mask: torch.Tensor) -> torch.Tensor | None:
    """What a mask lets through, as booleans; None for an additive mask that does more than hide."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.dtype.is_floating_point:
        return None
    visible, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min
    return visible if bool((visible | hidden).all()) else None


class Constants:
    """Evaluates nodes that depend on no input and no parameter, on request, up to `LARGEST_ELEMENTS`."""

    def __init__(self, graph: fx.Graph, values: dict[fx.Node, torch.Tensor]) -> None:
        self.values: dict[fx.Node, Any] = dict(values)
        self.constant = set(values)
        for node in graph.nodes:
            if _is_pure(node) and all(operand in self.constant for operand in node.all_input_nodes):
                self.constant.add(node)

    def value(self, node: fx.Node) -> Any:
        """The tensor (or tuple of them) that `node` always is; None if it is no constant or too large."""
        if node not in self.constant:
            return None
        for needed in self._order(node):
            self.values[needed] = self._evaluate(needed)
        return self.values[node]

    def _order(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that `node` needs and that have no value yet, operands first."""
        order: dict[fx.Node, None] = {}
        stack = [(node, False)]
        while stack:
            top, ready = stack.pop()
            if ready:
                order[top] = None
            elif top not in self.values and top not in order:
                stack.append((top, True))
                stack.extend((operand, False) for operand in top.all_input_nodes)
        return list(order)

    def _evaluate(self, node: fx.Node) -> Any:
        if any(self.values[operand] is None for operand in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
        args, kwargs = torch.utils._pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        if not isinstance(node.target, torch._ops.OpOverload):
            return node.target(*args, **kwargs)
        name = op_name(node)
        if torch.Tag.pointwise in node.target.tags or name in _POINTWISE:
            return _pointwise(node.target, args, kwargs, node.meta["val"].shape)
        is_view = name not in _MAY_COPY and any(r.alias_info is not None for r in node.target._schema.returns)
        result = node.meta["val"]
        if not is_view and isinstance(result, torch.Tensor) and result.numel() > LARGEST_ELEMENTS:
            return None
        made = node.target(*args, **kwargs)
        return _compress(made) if isinstance(made, torch.Tensor) else made


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return torch.Tag.nondeterministic_seeded not in node.target.tags and not node.target._schema.is_mutable


def _pointwise(target: Any, args: Any, kwargs: Any, shape: torch.Size) -> torch.Tensor | None:
    """`target` computed once along every dim that all operands repeat, then repeated."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    rank = len(shape)
    repeated = {d for d in range(rank) if all(_repeats(tensor, d - rank + tensor.dim()) for tensor in tensors)}
    elements = 1
    for d, size in enumerate(shape):
        elements *= 1 if d in repeated else size
    if elements > LARGEST_ELEMENTS:
        return None
    narrow = lambda t: _narrow(t, {d - rank + t.dim() for d in repeated} - set(range(-rank, 0)))  # noqa: E731
    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, narrow, (args, kwargs))
    made: torch.Tensor = target(*args, **kwargs)
    return made.expand(shape)


def _repeats(tensor: torch.Tensor, dim: int) -> bool:
    return bool(dim < 0 or tensor.shape[dim] == 1 or tensor.stride(dim) == 0)


def _narrow(tensor: torch.Tensor, dims: set[int]) -> torch.Tensor:
    for dim in dims:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _compress(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with stride 0 along every dim on which they repeat."""
    shape = tensor.shape
    if not 0 < tensor.numel() <= _COMPRESS_ELEMENTS:
        return tensor
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, 1)
        if shape[dim] > 1 and bool((tensor == first).all()):
            tensor = first
    return tensor.expand(shape)
