"""Scaled dot-product attention: b batch, h heads (or g groups of r), s queries, t keys, d their size, e the values'."""

from __future__ import annotations

from autoshard.ir.graph import Op, Tensor
from autoshard.ir.layout import Layout
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    NoRule,
    OperatorCall,
)
from autoshard.rules.algebra.derive import term_layout
from autoshard.rules.algebra.operator_record import Operator, OperatorVariant, TensorParallel, Work
from autoshard.rules.algebra.saved_for_backward import Kept, Operands, accumulator_bytes


def attention(call: OperatorCall) -> str:
    """The softmax needs all keys, and all of their size. An axis on `s` cuts the queries alone; `gather` and `ring` cut
    the keys too, and the variant brings them together; `heads` cuts the query heads of shared key heads anywhere."""
    query, key, _ = (shape for shape in call.shapes[:3] if shape is not None)
    if any(len(shape or query) > len(query) for shape in call.shapes) or len(query) < 2:
        raise NoRule
    batch, heads, groups = _leading(call, query, key)
    lead, own = f"{batch} {heads}".strip(), f"{batch} {groups}".strip()
    mask = _mask(call, [*batch.split(), *([heads] if heads else [])], query, key)
    loops = f"{lead} s d, {own} t d, {own} t e, {mask} -> {lead} s e"
    name = "random_attention" if call.get("dropout_p") else "parallel_attention"
    always = " | variant: random_attention" if call.get("dropout_p") else ""
    causal = " | variant: parallel_attention s" if call.get("is_causal") else ""
    ring = "" if always else "ring s+t ring_attention, "
    shared = f", heads g*r {name}" if heads == "(g r)" else ""
    return f"{loops} | whole: t d | plain: s{always or causal} | together: {ring}gather s+t {name}{shared}"


def _leading(call: OperatorCall, query: tuple[int, ...], key: tuple[int, ...]) -> tuple[str, str, str]:
    """The dims before the last two: (batch, query heads, key heads)."""
    lead = len(query) - 2
    if len(key) != len(query) or query[: max(lead - 1, 0)] != key[: max(lead - 1, 0)]:
        raise NoRule
    batch = " ".join("b" if index == 0 else f"b{index}" for index in range(lead - 1))
    if lead == 0 or query[lead - 1] == key[lead - 1]:
        return batch, "h" if lead else "", "h" if lead else ""
    if key[lead - 1] == 1:
        return batch, "h", "1"
    if not call.get("enable_gqa"):
        raise NoRule
    return batch, "(g r)", "g"


def _mask(call: OperatorCall, lead: list[str], query: tuple[int, ...], key: tuple[int, ...]) -> str:
    shape = call.shapes[3] if len(call.shapes) > 3 else None
    if shape is None:
        return "-"
    names = [*lead, "s", str(key[-2])][-len(shape) :] if shape else []
    return " ".join("1" if size == 1 else name for size, name in zip(shape, names, strict=True)) or "()"


def scores(local: Local) -> tuple[tuple[int, ...], Layout]:
    """Shape and layout of the scores (batch, heads, queries, keys), which the dropout mask follows."""
    query, key = local.instance.operands[0], local.instance.operands[1]
    assert query is not None and key is not None
    first, second = local.instance.rule.operands[:2]
    assert first is not None and second is not None
    dims = (*first.dims[:-1], second.dims[-2])
    shape = (*query.shape[:-1], key.shape[-2])
    return shape, term_layout(dims, local.instance, shape, local.strategy.choices, local.mesh)


def localise_parallel(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    query, key = local.instance.operands[:2]
    assert query is not None and key is not None
    given = dict(local.op.attributes)
    values: dict[str, LocalAttribute] = {name: given.get(name, default) for name, default in _DEFAULTS.items()}
    queries, keys, heads = local.axes("s", "ring", "gather"), local.axes("ring", "gather"), local.axes("heads")
    if queries:
        values |= {"rows": query.shape[-2], "columns": key.shape[-2]}
    if heads:
        values["query_heads"] = query.shape[-3]
    axes = (("queries", queries), ("keys", keys), ("heads", heads))
    return values, tuple((role, names) for role, names in axes if names)


def localise_random(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    values, axes = localise_parallel(local)
    shape, layout = scores(local)
    own: dict[str, LocalAttribute] = {"dropout_p": local.op.attribute("dropout_p")}
    own |= {"index": local.drawn, "shape": shape, "layout": str(layout)}
    return {**own, **values}, axes


_DEFAULTS: dict[str, float | bool | None] = {"is_causal": False, "scale": None, "enable_gqa": False}


def attention_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Fused attention: query, key, value, mask, the result, and a logsumexp per query."""
    query = operands[0]
    assert query is not None
    return (0, 1, 2, 3), (0,), query.numel // max(query.shape[-1], 1) * accumulator_bytes(query)


OPERATORS: dict[str, Operator] = {
    "aten.scaled_dot_product_attention": Operator(
        rule=attention,
        saves=attention_saves,
        autocast="low",
        order=(0, 2, 1, 3),  # the flash kernels write (batch, sequence, heads, dim)
        work=Work.ATTENTION,
        spelling="F.scaled_dot_product_attention({0}, {1}, {2}"
        "<attn_mask:3><dropout_p=0.0><is_causal=False><scale><enable_gqa=False>)",
        operand_names=("q", "k", "v", "attention_mask"),
        tensor_parallel=TensorParallel(("h",), (), True),
        split_words={(0, 0): "batch split", (0, 1): "heads split", (0, 2): "query positions split"},
        traced_as=("scaled_dot_product",),
        draws=("dropout_p",),
    ),
    "aten._scaled_dot_product_flash_attention": Operator(autocast="low"),
}
VARIANTS: dict[str, OperatorVariant] = {
    "parallel_attention": OperatorVariant(localise=localise_parallel),
    "random_attention": OperatorVariant(localise=localise_random),
    "ring_attention": OperatorVariant(localise=localise_parallel),
}
