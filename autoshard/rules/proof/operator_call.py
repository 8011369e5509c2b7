"""Calls of a torch operator from a graph's description: operands in schema order, other arguments by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoshard.ir.graph import DTYPE_BYTES
from autoshard.ir.layout import LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.ir.schemas import PLACEMENT, Operands, bind

if TYPE_CHECKING:
    from torch import Tensor


def evaluate(value: Any, mesh: Mesh, coordinates: Sequence[int]) -> Any:
    """Value of a local attribute on one device: every LocalSize as its length there."""
    if isinstance(value, LocalSize):
        return value.evaluate(mesh, coordinates)
    return tuple(evaluate(item, mesh, coordinates) for item in value) if isinstance(value, tuple) else value


def call(target: str, operands: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Any:
    """Runs an operator on operands (tensor arguments in schema order, lists flattened) and attributes by name."""
    import torch

    if target in ("autoshard.linear_in_out", "autoshard.float8_linear_in_out"):
        return _linear_in_out(*operands)
    if target == "autoshard.float8_linear":  # in float64 as any other
        return torch.nn.functional.linear(*operands)
    if target == "autoshard.rotate_half":
        first, second = operands[0].chunk(2, -1)  # type: ignore[union-attr]
        return torch.cat([-second, first], -1)
    if target == "autoshard.random":  # what is drawn is the variant's
        return torch.zeros(attributes["size"], dtype=getattr(torch, attributes["dtype"]))
    if target == "autoshard.experts":
        return _experts(operands, attributes)
    if target == "autoshard.embedding_bags":
        return _embedding_bag(*operands, **attributes)
    if target == "aten.batch_norm" and attributes["training"] and operands[3] is not None:
        return _batch_norm(operands, attributes)
    from autoshard.graph_capture.overloads import schema_of, schemas_of

    schema = schema_of(target, operands, attributes)
    if schema is None:
        names = ", ".join(attributes) or "no attributes"
        raise TypeError(f"no overload of {target} takes {len(operands)} operands and {names}")
    bound = bind(schema, operands, attributes)
    assert bound is not None, target
    kwargs = {name: _argument(value, operands) for name, value in bound.items()}
    switches = {a.name: True for a in schema.arguments if a.required and a.name in PLACEMENT and a.name not in kwargs}
    return schemas_of(target)[schema](**switches, **kwargs)


def _argument(value: Any, operands: Sequence[Any]) -> Any:
    if not isinstance(value, Operands):
        return plain(value)
    values = [operands[i] for i in value.positions]
    return values if value.is_list else values[0]


def _linear_in_out(x: Any, weight: Any, bias: Any = None) -> Any:
    return x @ weight if bias is None else x @ weight + bias


def _experts(operands: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """Mixture of experts as a user would write it: a weight for each pair of token and expert."""
    import torch.nn.functional as F

    x, up, down, chosen, weights, *biases = operands
    if biases:
        return _biased_experts(operands, attributes["limit"], attributes["alpha"])
    composed = {"gelu_tanh": lambda t: F.gelu(t, approximate="tanh"), "relu2": lambda t: F.relu(t) ** 2}
    activation = composed.get(attributes["activation"]) or getattr(F, attributes["activation"])
    count = chosen.shape[1]
    ids = chosen.reshape(-1)
    inner = (up[ids] @ x.repeat_interleave(count, 0).unsqueeze(-1)).squeeze(-1)
    gate, other = inner.chunk(2, -1) if attributes["gated"] else (inner, 1)
    outputs = (down[ids] @ (activation(gate) * other).unsqueeze(-1)).squeeze(-1)
    return (outputs * weights.reshape(-1, 1)).view(len(x), count, -1).sum(1)


def _biased_experts(operands: Sequence[Any], limit: float, alpha: float) -> Any:
    import torch

    x, up, down, chosen, weights, up_bias, down_bias = operands
    inner = torch.einsum("tm,tkmf->tkf", x, up[chosen]) + up_bias[chosen]
    gate, inner = inner[..., ::2].clamp(max=limit), inner[..., 1::2].clamp(-limit, limit)
    inner = (inner + 1) * gate * torch.sigmoid(alpha * gate)
    outputs = torch.einsum("tkf,tkfn->tkn", inner, down[chosen]) + down_bias[chosen]
    return (outputs * weights.unsqueeze(-1)).sum(1)


def _embedding_bag(weight: Any, ids: Any, offsets: Any, weights: Any, **attributes: Any) -> Any:
    import torch.nn.functional as F

    return F.embedding_bag(ids, weight, offsets, per_sample_weights=weights, **attributes)


def _batch_norm(operands: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Batch norm as captured: the new running statistics are results."""
    import torch

    momentum, eps = attributes["momentum"], attributes["eps"]
    out, _, _, mean, variance = torch.ops.aten._native_batch_norm_legit_functional(*operands, True, momentum, eps)
    return out, mean, variance


def plain(value: Any) -> Any:
    """Plain value: a dtype by its name; a tuple as the list that torch takes."""
    if isinstance(value, str) and value in DTYPE_BYTES:
        import torch

        return getattr(torch, value)
    return list(value) if isinstance(value, tuple) else value
