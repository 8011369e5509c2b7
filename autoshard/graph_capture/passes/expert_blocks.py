"""Folds a block of experts into one op, `autoshard.experts`: tokens go to the experts that a router chose, come back
weighted and are summed.

Operands: x (t, m), up (e, f, m) or gate and up (e, 2f, m), down (e, n, f), chosen (t, k), weights (t, k); result
(t, n) = sum_k weights * down[chosen] act(up[chosen] x), where act(gate) * up stands for act(up) if `gated`.
act is an activation of torch's, or relu squared. With biases (gpt-oss): up (e, m, 2f), down (e, f, n), then up_bias
(e, 2f) and down_bias (e, n), `biased`; gate and up alternate, and (min(up, limit) + 1) * gate * sigmoid(alpha * gate)
is between the products.
Both of the `transformers` library's forms are known: a weight gathered for each pair of token and expert (which is far
larger than the experts), and pairs sorted by expert and grouped. What stays of either is what something else reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product as product_of
from math import prod
from typing import Any

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Attribute, Graph, Op, Tensor

EXPERTS = "autoshard.experts"
_ACTIVATIONS = {"aten.gelu": "gelu", "aten.relu": "relu", "aten.silu": "silu", "aten.tanh": "tanh"}

# A pattern is a name, bound to one value everywhere, or (target, operand patterns...); `target#1` is its second result.
Pattern = str | tuple[Any, ...]
_IDS: Pattern = ("reshape", "ids")
_SORTED: Pattern = ("sort#0", _IDS)
_ORDER: Pattern = ("sort#1", _IDS)
_ENDS: Pattern = ("cumsum", ("histc", ("?to", _SORTED)))
_BACK: Pattern = ("index_put", ("full",), _ORDER, ("arange",))


def _batched(weight: str, x: Pattern) -> Pattern:
    return ("squeeze", ("bmm", ("index", weight, _IDS), ("unsqueeze", x)))


def _grouped(weight: str, x: Pattern) -> Pattern:
    return ("*grouped_mm", x, ("transpose", weight), _ENDS)


def _batched_in_out(weight: str, x: Pattern) -> Pattern:
    return ("squeeze", ("bmm", ("unsqueeze", x), ("index", weight, _IDS)))


def _grouped_in_out(weight: str, x: Pattern) -> Pattern:
    return ("*grouped_mm", x, weight, _ENDS)


_GATHERED: Pattern = ("repeat_interleave", "x")
_PICKED: Pattern = ("index", "x", ("floor_divide", _ORDER))
_WEIGHTS: Pattern = ("unsqueeze", ("reshape", "weights"))
_SORTED_WEIGHTS: Pattern = ("unsqueeze", ("index", ("reshape", "weights"), _ORDER))


def _batched_biased(weight: str, x: Pattern) -> Pattern:
    return ("add", _batched_in_out(weight, x), ("index", f"{weight}_bias", _IDS))


def _grouped_biased(weight: str, x: Pattern) -> Pattern:
    return ("add", _grouped_in_out(weight, x), ("index", f"{weight}_bias", _SORTED))


def _clipped(inner: Pattern) -> Pattern:
    """Pattern between the products of gpt-oss; `_clips` reads its numbers."""
    gate = ("clamp@gate", ("slice@even", inner))
    up = ("add@plus", ("clamp@up", ("slice@odd", inner)))
    return ("mul", up, ("mul", gate, ("sigmoid", ("mul@alpha", gate))))


# by form: what goes into the first product, the products of weights (out, in), of weights (in, out), of these with a
# bias, and what comes out of the second, weighted
_FORMS = (
    (
        _GATHERED, _batched, _batched_in_out, _batched_biased,
        lambda y: ("sum", ("reshape", ("mul", y, _WEIGHTS))),
    ),
    (
        _PICKED, _grouped, _grouped_in_out, _grouped_biased,
        lambda y: ("sum", ("reshape", ("index", ("mul", y, _SORTED_WEIGHTS), _BACK))),
    ),
)  # fmt: skip


def fold_experts(graph: Graph) -> Graph:
    """Fold every block that is one of the forms; the rest is unchanged."""
    ops: list[Op] = []
    tensors: list[Tensor] = []
    for op in graph.ops:
        block, in_out = _folded(op, graph) or (None, False)
        ops.append(op if block is None else _in_order(block, in_out, graph, ops, tensors))
    return rewrite(graph, ops, tensors=tensors) if ops != list(graph.ops) else graph


def _folded(op: Op, graph: Graph) -> tuple[Op, bool] | None:
    """The block that ends in `op`, and whether its weights are (in, out), which is yet to be turned."""
    attributes = dict(op.attributes)
    if op.target != "aten.sum" or attributes.get("dim") != (1,) or attributes.get("keepdim"):
        return None
    for first, product, in_out, biased, last in _FORMS:
        values = _match(last(biased("down", _clipped(biased("up", first)))), op.results[0], graph, {})
        numbers = _clips(values, graph) if values else ()
        if values and numbers and _fits(values, op, graph, True, in_out=True, biased=True):
            return _biased_experts_op(values, op, graph, numbers), False
        for multiplied, gated, activation in product_of((product, in_out), (True, False), _INNER):
            up = multiplied("up", first)
            inner = ("mul", activation(("split#0", up)), ("split#1", up)) if gated else activation(up)
            values = _match(last(multiplied("down", inner)), op.results[0], graph, {})
            if values and _fits(values, op, graph, gated, in_out=multiplied is in_out):
                return _experts_op(values, op, graph, gated), multiplied is in_out
    return None


_INNER: tuple[Callable[[Pattern], Pattern], ...] = (
    lambda x: ("!activation", x),
    lambda x: ("square", ("relu@squared", x)),
)


def _experts_op(values: Mapping[str, str], op: Op, graph: Graph, gated: bool) -> Op:
    attributes: dict[str, Attribute] = {
        "experts": graph.tensor(values["up"]).shape[0],
        "activation": "relu2" if "@squared" in values else _activation(graph.producers[values["!activation"]]),
        "gated": gated,
    }
    operands = tuple(values[name] for name in ("x", "up", "down", "ids", "weights"))
    return replace(op, target=EXPERTS, operands=operands, attributes=tuple(attributes.items()))


def _in_order(block: Op, in_out: bool, graph: Graph, ops: list[Op], tensors: list[Tensor]) -> Op:
    """The block with what `ops` and `tensors` get before it: weights transposed to (out, in), one row a token of what
    was chosen."""

    def added(value: str, target: str, size: tuple[int, ...], **attributes: Attribute) -> str:
        name = f"{block.name}_{value}"
        tensors.append(replace(graph.tensor(value), name=name, shape=size))
        ops.append(
            replace(
                block,
                name=name,
                target=target,
                operands=(value,),
                results=(name,),
                attributes=tuple(attributes.items()),
            )
        )
        return name

    def ready(position: int, value: str) -> str:
        shape = graph.tensor(value).shape
        if position in (1, 2) and in_out:
            return added(value, "aten.transpose", (shape[0], shape[2], shape[1]), dim0=1, dim1=2)
        if position in (3, 4) and len(shape) > 2:
            rows = (prod(shape[:-1]), shape[-1])
            return added(value, "aten.reshape", rows, shape=rows)
        return value

    return replace(block, operands=tuple(ready(i, name or "") for i, name in enumerate(block.operands)))


def _biased_experts_op(values: Mapping[str, str], op: Op, graph: Graph, numbers: tuple[float, ...]) -> Op:
    limit, alpha = numbers
    attributes: dict[str, Attribute] = {
        "experts": graph.tensor(values["up"]).shape[0],
        "activation": "clipped",
        "gated": True,
        "limit": limit,
        "alpha": alpha,
    }
    operands = tuple(values[name] for name in ("x", "up", "down", "ids", "weights", "up_bias", "down_bias"))
    return replace(op, target=EXPERTS, operands=operands, attributes=tuple(attributes.items()))


def _clips(values: Mapping[str, str], graph: Graph) -> tuple[float, ...]:
    """Limit and alpha, () where the steps between the products are others."""
    gate, up, even, odd, plus, scaled = (
        dict(graph.producers[values[f"@{name}"]].attributes) for name in ("gate", "up", "even", "odd", "plus", "alpha")
    )
    limit, alpha, size = gate.get("max"), scaled.get("other"), graph.tensor(values["up"]).shape[2]
    if not isinstance(limit, int | float) or not isinstance(alpha, int | float):
        return ()
    clipped = gate.get("min") is None and up.get("max") == limit and up.get("min") == -limit
    one = plus.get("other") == 1 and plus.get("alpha", 1) == 1
    alternate = all(
        part.get("dim") == 1 and part.get("start") == start and _number(part.get("end")) >= size
        and part.get("step") == 2
        for start, part in enumerate((even, odd))
    )  # fmt: skip
    return (float(limit), float(alpha)) if clipped and one and alternate else ()


def _activation(op: Op) -> str:
    tanh = dict(op.attributes).get("approximate") == "tanh"
    return _ACTIVATIONS[op.target] + ("_tanh" if tanh else "")


def _fits(
    values: Mapping[str, str], op: Op, graph: Graph, gated: bool, *, in_out: bool = False, biased: bool = False
) -> bool:
    """The shapes of one block: experts in front, and one position of the result a token."""
    x, up, down, ids, weights = (graph.tensor(values[name]) for name in ("x", "up", "down", "ids", "weights"))
    result = graph.tensor(op.results[0])
    if not (len(x.shape) == len(result.shape) == 2 <= len(ids.shape) and len(up.shape) == len(down.shape) == 3):
        return False
    experts, inner, size = up.shape if not in_out else (up.shape[0], up.shape[2], up.shape[1])
    tokens, each = prod(ids.shape[:-1]), ids.shape[-1]
    hidden, width = inner // (1 + gated), result.shape[1]
    if biased and not _biases(values, graph, (experts, inner), (experts, width)):
        return False
    by = values.get("floor_divide")
    return (
        ids.shape == weights.shape
        and graph.tensor(op.operands[0] or "").shape == (tokens, each, result.shape[1])
        and (by is None or graph.producers[by].attribute("other") == each)
        and x.shape == (tokens, size)
        and down.shape == ((experts, hidden, width) if in_out else (experts, width, hidden))
        and result.shape[0] == x.shape[0]
        and result.dtype == x.dtype
    )


def _biases(values: Mapping[str, str], graph: Graph, up: tuple[int, int], down: tuple[int, int]) -> bool:
    return graph.tensor(values["up_bias"]).shape == up and graph.tensor(values["down_bias"]).shape == down


def _match(pattern: Pattern, value: str | None, graph: Graph, values: dict[str, str]) -> dict[str, str] | None:
    """`values` with what the names of the pattern stand for; None where the value is made otherwise."""
    if value is None:
        return None
    if isinstance(pattern, str):
        return values if values.setdefault(pattern, value) == value else None
    target, *operands = pattern
    target, _, label = target.partition("@")
    if label:
        values = {**values, f"@{label}": value}
    op = graph.producers.get(value)
    if target.startswith("?") and (op is None or op.target != f"aten.{target[1:]}"):
        return _match(operands[0], value, graph, values)
    if op is None or not _is(op, target.lstrip("?"), value):
        return None
    if target in ("!activation", "floor_divide"):
        values = {**values, target: value}
    if target == "arange" or target == "full":
        return values if _counts(op) else None
    present = [name for name in op.operands if name is not None]
    if len(present) != len(operands) or not _arguments(op, graph):
        return None
    for inner, name in zip(operands, present, strict=True):
        matched = _match(inner, name, graph, values)
        if matched is None:
            return None
        values = matched
    return values


def _is(op: Op, target: str, value: str) -> bool:
    name, _, position = target.partition("#")
    if op.results.index(value) != int(position or 0):
        return False
    if name == "!activation":
        return op.target in _ACTIVATIONS
    return (
        op.target.endswith(("grouped_mm", "grouped_mm_fallback"))
        if name == "*grouped_mm"
        else op.target == f"aten.{name}"
    )


def _counts(op: Op) -> bool:
    """0, 1, 2, ...; or anything in whose place that is put."""
    attributes = dict(op.attributes)
    return op.target == "aten.full" or (attributes.get("start", 0) == 0 and attributes.get("step", 1) == 1)


def _arguments(op: Op, graph: Graph) -> bool:
    """The arguments that make these operators steps of a block."""
    attributes = dict(op.attributes)
    last = len(graph.tensor(op.results[0]).shape) - 1
    wanted: dict[str, bool] = {
        "aten.repeat_interleave": attributes.get("dim") == 0,
        "aten.sort": not attributes.get("descending"),
        "aten.split": attributes.get("dim") == 1 and len(op.results) == 2 and len(set(_sizes(attributes))) == 1,
        "aten.add": attributes.get("alpha", 1) == 1,
        "aten.squeeze": attributes.get("dim") in (last, (last,), last + 1, (last + 1,)),
        "aten.unsqueeze": attributes.get("dim") == last or (last == 2 and attributes.get("dim") == 1),
        "aten.transpose": {attributes.get("dim0"), attributes.get("dim1")} == {1, 2},
        "aten.histc": attributes.get("min") == 0 and attributes.get("max") == (_number(attributes.get("bins")) - 1),
        "aten.index_put": not attributes.get("accumulate"),
        "aten.index": len(op.operands) == 2,
    }
    return wanted.get(op.target, True)


def _sizes(attributes: Mapping[str, Attribute]) -> tuple[Attribute, ...]:
    value = attributes.get("split_size", attributes.get("split_sizes"))
    return value if isinstance(value, tuple) else (value,)


def _number(value: Attribute) -> int:
    return int(value) if isinstance(value, int | float) else 0
