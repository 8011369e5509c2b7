"""A few lines that run a Graph with torch's own operators: the oracle of what a captured graph means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoshard.ir.graph import Graph, Op


def run(graph: Graph, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every value of the graph by name, from those of its inputs, parameters and buffers."""
    computed = dict(values)
    for op in graph.ops:
        results = call(op, [None if name is None else computed[name] for name in op.operands])
        assert len(results) == len(op.results), op
        for name, value in zip(op.results, results, strict=True):
            assert tuple(value.shape) == graph.tensor(name).shape, (op, value.shape)
            computed[name] = value
    return computed


def call(op: Op, operands: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """The results of one op."""
    special = _SPECIAL.get(op.target)
    result = special(op, *operands) if special else _schema_call(op, operands)
    return list(result) if isinstance(result, tuple | list) else [result]


def _linear_in_out(op: Op, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return left @ right if bias is None else left @ right + bias


def _to(op: Op, value: torch.Tensor) -> torch.Tensor:
    return value.to(_dtype(op.attribute("dtype")))


def _constant(op: Op) -> torch.Tensor:
    return torch.tensor(op.attribute("values"), dtype=_dtype(op.attribute("dtype"))).reshape(op.attribute("shape"))


def _batch_norm(op: Op, x: Any, weight: Any, bias: Any, mean: Any, variance: Any) -> tuple[torch.Tensor, ...]:
    attrs = dict(op.attributes)
    updated = [mean.clone(), variance.clone()]
    y = torch.nn.functional.batch_norm(x, *updated, weight, bias, attrs["training"], attrs["momentum"], attrs["eps"])
    return (y, *updated) if len(op.results) == 3 else (y,)


def _rotate_half(op: Op, x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


_SPECIAL = {
    "autoshard.linear_in_out": _linear_in_out, "aten.to": _to, "autoshard.constant": _constant,
    "aten.batch_norm": _batch_norm, "autoshard.rotate_half": _rotate_half,
}  # fmt: skip


def _dtype(name: Any) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _schema_call(op: Op, operands: list[torch.Tensor | None]) -> Any:
    """The overload whose arguments are just the op's operands and attributes."""
    packet = getattr(torch.ops.aten, op.target.removeprefix("aten."))
    for overload in packet.overloads():
        arguments = _bind(getattr(packet, overload)._schema, op, operands)
        if arguments is not None:
            return getattr(packet, overload)(*arguments[0], **arguments[1])
    raise AssertionError(f"no overload of {op.target} takes {op}")


def _bind(schema: Any, op: Op, operands: list[torch.Tensor | None]) -> tuple[list[Any], dict[str, Any]] | None:
    """Arguments for one overload, None if the op is not of this overload. What the graph leaves out is default."""
    left, attrs = list(operands), dict(op.attributes)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in schema.arguments:
        kind = str(argument.type)
        if argument.name in attrs:
            value = _value(argument.name, attrs.pop(argument.name))
            if not _fits(kind, value, op):
                return None
        elif "Tensor" in kind and left:
            value, left = (left, []) if "List" in kind else (left[0], left[1:])
        elif argument.has_default_value() and "Tensor" not in kind:
            continue
        else:
            return None
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return None if left or attrs else (positional, named)


def _value(name: str, value: Any) -> Any:
    if name == "dtype" and value is not None:
        return _dtype(value)
    return list(value) if isinstance(value, tuple) else value


def _fits(kind: str, value: Any, op: Op) -> bool:
    if "Tensor" in kind:  # a Python number beside a tensor
        return op.target in ("aten.mul", "aten.add", "aten.sub", "aten.div") and kind == "Tensor"
    return value is None or isinstance(value, list) == ("List" in kind)
