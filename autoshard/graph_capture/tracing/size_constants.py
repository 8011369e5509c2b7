"""Evaluates what a forward computes from sizes alone, to recognise an attention mask that is exactly the causal one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoshard.graph_capture.tracing import LARGEST_ELEMENTS, PACKED_ELEMENTS
from autoshard.graph_capture.tracing.fills import op_name

_POINTWISE = ("__and__", "__or__", "where", "masked_fill", "to", "clone", "contiguous")  # torch does not tag these
_MAY_COPY = ("reshape", "flatten")


def recognise_masks(graph: fx.Graph, values: dict[fx.Node, torch.Tensor]) -> None:
    """Replace masks in place: attention with a causal mask becomes `is_causal`, one that hides nothing is dropped.

    `values` are the graph's real constants by placeholder.
    """
    constants = Constants(graph, values)
    verdicts: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if op_name(node) == "scaled_dot_product_attention" and len(node.args) > 3 and isinstance(node.args[3], fx.Node):
            mask = node.args[3]
            if mask not in verdicts:
                known, queries = constants.value(mask), node.args[0].meta["val"].shape[-2]
                large = known is None and mask in constants.constant
                shape = tuple(mask.meta["val"].shape[-2:]) if large else ()
                fits = len(shape) == 2 and shape[0] == queries
                verdicts[mask] = structural_kind(mask, shape, constants.value) if fits else _kind(known, queries)
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
    mask = _narrow(mask, _repeated(mask) & set(range(mask.dim() - 2)))
    visible = _visible(mask)
    if visible is None:
        return "other"
    if bool(visible.all()):
        return "everything"
    size = mask.shape[-1]
    return "causal" if bool((visible == torch.ones(queries, size, dtype=torch.bool).tril()).all()) else "other"


def _visible(mask: torch.Tensor) -> torch.Tensor | None:
    """Scores that a mask lets through, as booleans; None for an additive mask that does more than hide."""
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
        value = node.target(*args, **kwargs)
        return _compress(value) if isinstance(value, torch.Tensor) else value


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
    value: torch.Tensor = target(*args, **kwargs)
    return value.expand(shape)


def _repeats(tensor: torch.Tensor, dim: int) -> bool:
    return bool(dim < 0 or tensor.shape[dim] == 1 or tensor.stride(dim) == 0)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """All its values: a mask of long sequences may repeat one of them a billion times."""
    return _narrow(tensor, _repeated(tensor))


def _repeated(tensor: torch.Tensor) -> set[int]:
    return {d for d in range(tensor.dim()) if tensor.stride(d) == 0 and tensor.shape[d] > 1}


def _narrow(tensor: torch.Tensor, dims: set[int]) -> torch.Tensor:
    for dim in dims:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _compress(tensor: torch.Tensor) -> torch.Tensor:
    """Equal tensor with stride 0 along every dim on which the values repeat."""
    shape = tensor.shape
    if not 0 < tensor.numel() <= PACKED_ELEMENTS:
        return tensor
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, 1)
        if shape[dim] > 1 and bool((tensor == first).all()):
            tensor = first
    return tensor.expand(shape)


Value = Callable[[fx.Node], Any]  # what a node always is; None where it is no constant or too large
_SAME = ("expand", "to", "clone", "contiguous", "alias", "unsqueeze", "view", "_to_copy")
_AND = ("__and__", "bitwise_and", "logical_and")
_STRICT = {"le": False, "ge": False, "lt": True, "gt": True}


# --- masks that are too large: decided exactly from the column (queries, 1) and the row (1, keys) that they compare ---


def structural_kind(mask: fx.Node, shape: tuple[int, ...], value: Value) -> str:
    """ "causal", "everything" or "other" for a mask whose last dims, (queries, keys), are `shape`. Without certainty it
    is "other"."""
    if op_name(mask) == "where" and mask.meta["val"].dtype.is_floating_point:
        return _shown(mask.args[0], shape, value) if _hides(mask, value) else "other"
    return _shown(mask, shape, value)


def _shown(node: Any, shape: tuple[int, ...], value: Value) -> str:
    """Kind of a boolean mask, as in `structural_kind`; "other" for numbers: 0, where a query sees a key, is false."""
    if not isinstance(node, fx.Node):
        return "everything" if node is True else "other"
    if node.meta["val"].dtype != torch.bool:
        return "other"
    known = value(node)
    if isinstance(known, torch.Tensor):
        return "everything" if bool(_once(known).all()) else "other"
    if tuple(node.meta["val"].shape[-2:]) != shape:
        return "other"
    name = op_name(node)
    if name in _SAME:
        return _shown(node.args[0], shape, value)
    if name in _AND:
        kinds = {_shown(operand, shape, value) for operand in node.args[:2]}
        return "other" if "other" in kinds else "causal" if "causal" in kinds else "everything"
    return _compared(name, node, value) if name in (*_STRICT, "eq") else "other"


def _hides(node: fx.Node, value: Value) -> bool:
    """True if an additive mask is 0 where its condition holds, and hides elsewhere."""
    branches = [value(x) if isinstance(x, fx.Node) else x for x in node.args[1:3]]
    if any(x is None for x in branches) or len(branches) != 2:
        return False
    seen, hidden = (_once(torch.as_tensor(x)) for x in branches)
    least = torch.finfo(node.meta["val"].dtype).min
    return bool((seen == 0).all()) and bool((hidden <= least).all())


def _compared(name: str, node: fx.Node, value: Value) -> str:
    left, right = (value(x) if isinstance(x, fx.Node) else None for x in node.args[:2])
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return "other"
    if name == "eq":
        ends = [end for x in (_once(left), _once(right)) for end in (x.min(), x.max())]
        return "everything" if all(bool(end == ends[0]) for end in ends) else "other"
    smaller, larger = (left, right) if name in ("le", "lt") else (right, left)
    strict = _STRICT[name]
    most, least = _once(smaller).max(), _once(larger).min()
    if bool(most < least if strict else most <= least):
        return "everything"
    key, query = _line(smaller, -1), _line(larger, -2)
    shape = node.meta["val"].shape
    if key is None or query is None or (len(query), len(key)) != tuple(shape[-2:]) or len(query) != len(key):
        return "other"
    seen = key.cummax(0).values  # the i-th query sees the keys up to the i-th, and none after
    after = key.flip(0).cummin(0).values.flip(0)[1:]
    if strict:
        causal = (seen < query).all() and (after >= query[:-1]).all()
    else:
        causal = (seen <= query).all() and (after > query[:-1]).all()
    return "causal" if bool(causal) else "other"


def _line(x: torch.Tensor, dim: int) -> torch.Tensor | None:
    """The values of a tensor that differ along one of its last two dims alone."""
    if x.dim() < -dim or x.dtype == torch.bool:
        return None
    others = [d for d in range(x.dim()) if d != x.dim() + dim]
    for d in others:
        if x.shape[d] > 1 and x.stride(d) != 0:
            return None
        x = x.narrow(d, 0, 1)
    return x.flatten()
