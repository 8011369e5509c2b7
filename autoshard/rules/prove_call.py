"""Call a torch operator from a graph's description of it: operands in schema order, other arguments by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoshard.graph.model import DTYPE_BYTES
from autoshard.layout import LocalSize
from autoshard.mesh import Mesh

if TYPE_CHECKING:
    from torch import Tensor

LIST_LENGTHS = {("aten::lstm", "hx"): 2, ("aten::index_put", "indices"): -1}  # of a list that is not the last


def evaluate(value: Any, mesh: Mesh, coordinates: Sequence[int]) -> Any:
    """A local attribute on one device: every LocalSize as its length there."""
    if isinstance(value, LocalSize):
        return value.evaluate(mesh, coordinates)
    return tuple(evaluate(item, mesh, coordinates) for item in value) if isinstance(value, tuple) else value


def call(target: str, operands: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Any:
    """Run an operator on operands (tensor arguments in schema order, lists flattened) and attributes by name."""
    import torch

    if target == "autoshard.linear_in_out":
        return _linear_in_out(*operands)
    if target == "autoshard.random":  # what is drawn is the variant's
        return torch.zeros(attributes["size"], dtype=getattr(torch, attributes["dtype"]))
    if target == "autoshard.experts":
        return _experts(operands, attributes)
    if target == "aten.batch_norm" and attributes["training"] and operands[3] is not None:
        return _batch_norm(operands, attributes)
    namespace, _, name = target.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = _arguments(overload._schema, operands, attributes)
        if arguments is not None:
            return overload(**arguments)
    raise TypeError(
        f"no overload of {target} takes {len(operands)} operands and {', '.join(attributes) or 'no attributes'}"
    )


def _linear_in_out(x: Any, weight: Any, bias: Any = None) -> Any:
    return x @ weight if bias is None else x @ weight + bias


def _experts(operands: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """As a person would write it: a weight for each pair of token and expert."""
    import torch.nn.functional as F

    x, up, down, chosen, weights = operands
    name, _, tanh = given["activation"].partition("_")
    options = {"approximate": "tanh"} if tanh else {}
    count = chosen.shape[1]
    ids = chosen.reshape(-1)
    inner = (up[ids] @ x.repeat_interleave(count, 0).unsqueeze(-1)).squeeze(-1)
    gate, other = inner.chunk(2, -1) if given["gated"] else (inner, 1)
    made = (down[ids] @ (getattr(F, name)(gate, **options) * other).unsqueeze(-1)).squeeze(-1)
    return (made * weights.reshape(-1, 1)).view(len(x), count, -1).sum(1)


def _batch_norm(operands: Sequence[Any], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """As captured: the new running statistics are results."""
    import torch

    momentum, eps = given["momentum"], given["eps"]
    out, _, _, mean, variance = torch.ops.aten._native_batch_norm_legit_functional(*operands, True, momentum, eps)
    return out, mean, variance


def _arguments(schema: Any, operands: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments by name, or None where this overload does not fit."""
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    if any(argument.is_out for argument in schema.arguments):
        return None
    if not all(_takes(kinds.get(name, "Tensor"), value) for name, value in attributes.items()):
        return None
    slots = [argument for argument in schema.arguments if argument.name not in attributes]
    left = list(operands)
    result = dict(attributes)
    for argument in slots:
        kind = str(argument.type)
        if "Tensor" not in kind:
            if argument.has_default_value():
                continue
            return None
        if "List" in kind:
            count = LIST_LENGTHS.get((schema.name, argument.name), len(left))
            result[argument.name], left = left[:count], left[count:]
        elif left:
            result[argument.name] = left.pop(0)
        elif not argument.has_default_value():
            return None
    return None if left else {name: plain(value) for name, value in result.items()}


def _takes(kind: str, value: Any) -> bool:
    return "Tensor" not in kind and ("List" in kind or not isinstance(value, tuple)) and not _text_for_list(kind, value)


def _text_for_list(kind: str, value: Any) -> bool:
    """`padding="same"` where numbers are taken."""
    return "List" in kind and isinstance(value, str)


def plain(value: Any) -> Any:
    """A dtype by its name; a tuple as the list that torch takes."""
    if isinstance(value, str) and value in DTYPE_BYTES:
        import torch

        return getattr(torch, value)
    return list(value) if isinstance(value, tuple) else value
