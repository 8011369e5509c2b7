"""Scaled dot-product attention: b batch, h heads (or g groups of r), s queries, t keys, d their size, e the values'."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from autoshard.ir.graph import DTYPE_BYTES, Op, Tensor
from autoshard.ir.layout import Layout
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    NoRule,
    OperatorCall,
)
from autoshard.rules.algebra.derive import term_layout
from autoshard.rules.algebra.operator_record import Operator, TensorParallel, Work
from autoshard.rules.algebra.saved_for_backward import NOTHING, Kept, Operands, accumulator_bytes
from autoshard.rules.algebra.variant_record import (
    ACCUMULATED,
    Call,
    Inside,
    KeptTensors,
    Layouts,
    LocalTensors,
    OperatorVariant,
    Temporary,
    bytes_of,
    first,
    shards,
    wide_bytes,
)


def attention(call: OperatorCall) -> str:
    """Rule of attention. The softmax needs all keys, and all of their size. An axis on `s` shards the queries alone;
    `gather`, `ring` and `balanced` shard the keys too, and the variant joins them; `heads` splits the query heads of
    shared key heads anywhere."""
    query, key, _ = (shape for shape in call.shapes[:3] if shape is not None)
    if any(len(shape or query) > len(query) for shape in call.shapes) or len(query) < 2:
        raise NoRule
    batch, heads, groups = _leading(call, query, key)
    lead, key_lead = f"{batch} {heads}".strip(), f"{batch} {groups}".strip()
    mask = _mask(call, [*batch.split(), *([heads] if heads else [])], query, key)
    loops = f"{lead} s d, {key_lead} t d, {key_lead} t e, {mask} -> {lead} s e"
    name = "random_attention" if call.get("dropout_p") else "parallel_attention"
    always = " | variant: random_attention" if call.get("dropout_p") else ""
    causal = " | variant: parallel_attention s" if call.get("is_causal") else ""
    ring = "" if always else "ring s+t ring_attention, "
    if ring and call.get("is_causal") and query[-2] == key[-2]:
        ring += "balanced s+t balanced_ring_attention, "
    shared = f", heads g*r {name}" if heads == "(g r)" else ""
    return f"{loops} | whole: t d | plain: s{always or causal} | together: {ring}gather s+t {name}{shared}"


def _leading(call: OperatorCall, query: tuple[int, ...], key: tuple[int, ...]) -> tuple[str, str, str]:
    """Dims before the last two: (batch, query heads, key heads)."""
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
    attributes = dict(local.op.attributes)
    values: dict[str, LocalAttribute] = {name: attributes.get(name, default) for name, default in _DEFAULTS.items()}
    queries, keys, heads = local.axes("s", *_BOTH), local.axes(*_BOTH), local.axes("heads")
    if queries:
        values |= {"rows": query.shape[-2], "columns": key.shape[-2]}
    if heads:
        values["query_heads"] = query.shape[-3]
    axes = (("queries", queries), ("keys", keys), ("heads", heads))
    return values, tuple((role, names) for role, names in axes if names)


def localise_random(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    values, axes = localise_parallel(local)
    shape, layout = scores(local)
    extra: dict[str, LocalAttribute] = {"dropout_p": local.op.attribute("dropout_p")}
    extra |= {"index": local.drawn, "shape": shape, "layout": str(layout)}
    return {**extra, **values}, axes


_BOTH = ("ring", "balanced", "gather")  # the choices that cut queries and keys
_DEFAULTS: dict[str, float | bool | None] = {"is_causal": False, "scale": None, "enable_gqa": False}


def attention_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Tensors kept of fused attention: query, key, value, mask, the result, and a logsumexp per query."""
    query = operands[0]
    assert query is not None
    return (0, 1, 2, 3), (0,), query.numel // max(query.shape[-1], 1) * accumulator_bytes(query)


def attended(local: LocalOp, whole: tuple[tuple[int, ...] | None, ...]) -> LocalOp:
    """Work of a device that gathers the keys: its queries on all of them. Under a causal mask the last device is the
    busiest, and its queries, the last of the `whole` ones, see all but half of its own share."""
    q, k, v = (local.operand(position) for position in range(3))
    assert whole[0] is not None and whole[1] is not None
    rows, columns = q.shape[-2], whole[1][-2]
    causal = local.causal and rows == whole[0][-2]
    if local.causal and not causal:
        columns = min(columns, max(whole[0][-2] - rows // 2, 1))
    key, value = (replace(x, shape=(*x.shape[:-2], columns, x.shape[-1])) for x in (k, v))
    return replace(local, operands=(q, key, value, *local.operands[3:]), causal=causal)


def attended_by_half(local: LocalOp, whole: tuple[tuple[int, ...] | None, ...]) -> LocalOp:
    """Work of every device of a balanced ring: blocks without a mask but for its own, half of all scores."""
    q, k, v = (local.operand(position) for position in range(3))
    assert whole[1] is not None
    columns = max(whole[1][-2] // 2, 1)
    key, value = (replace(x, shape=(*x.shape[:-2], columns, x.shape[-1])) for x in (k, v))
    return replace(local, operands=(q, key, value, *local.operands[3:]), causal=False)


def attended_balanced(local: LocalOp, whole: tuple[tuple[int, ...] | None, ...]) -> LocalOp:
    """Work of device i, which has chunks i and 2n-1-i of 2n: under a causal mask all see half of the keys."""
    q, k, v = (local.operand(position) for position in range(3))
    assert whole[1] is not None
    key, value = (replace(x, shape=(*x.shape[:-2], whole[1][-2], x.shape[-1])) for x in (k, v))
    return replace(local, operands=(q, key, value, *local.operands[3:]))


def is_unfused(operands: LocalTensors) -> bool:
    """True if a ring makes scores: no fused kernel takes a mask, or float32."""
    masked = len(operands) > 3 and operands[3] is not None
    return masked or (operands[0] is not None and operands[0].dtype not in ("bfloat16", "float16"))


def ring_traffic(local: LocalOp) -> tuple[float, float]:
    """Bytes of scores that a ring reads and writes, in float32, forward and backward, if no fused kernel takes them:
    with a mask, or not in half precision."""
    if not is_unfused(local.operands):
        return 0.0, 0.0
    scores = 4.0 * math.prod(local.operand(0).shape[:-1]) * local.operand(1).shape[-2]
    return 10 * scores, 15 * scores


def gathered_collectives(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> Inside:
    """Keys and values in one all-gather, inner axes first; backward gathers again and scatters their gradients."""
    gathers = tuple(_gathers(mesh, operands, layouts))
    scatters = ((axis, "reduce_scatter", full) for axis, _, full in reversed(gathers))
    return Inside(gathers, (*gathers, *scatters))


def ring_collectives(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> Inside:
    """Collectives of a ring. A block passes every device once (an all-gather's traffic); backward, with its float32
    gradients, which also go home. Over several axes it goes round the innermost before each step of the next."""
    blocks = [x for x in operands[1:3] if x is not None]
    block = full = float(sum(x.bytes for x in blocks))
    wider = max(4 / DTYPE_BYTES[blocks[0].dtype], 1)
    calls, back = list[Call](), list[Call]()
    for axis in _sequence_axes(blocks[0], layouts):
        size = mesh.sizes[axis]
        full *= size
        calls.append((axis, "all_gather", full))
        back += [(axis, "all_gather", full), (axis, "all_gather", wider * (full + block * size / (size - 1)))]
    return Inside(tuple(calls), tuple(back), beside=frozenset({"all_gather"}))


def balanced_collectives(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> Inside:
    """Collectives of a ring, and those before and after it: queries, keys and values from the order of the sequence and
    the result back, and their gradients. Over several axes at most a message each."""
    ring, (q, k, v) = ring_collectives(mesh, op, operands, layouts), operands[:3]
    assert q is not None and v is not None
    whole = bytes_of(q, k, v) + _result_bytes(q, v)
    axes = [axis for axis, _, _ in ring.forward]
    share = _moved_share(math.prod(mesh.sizes[axis] for axis in axes))
    calls = tuple((axis, "all_to_all", whole * share / (1 - 1 / mesh.sizes[axis])) for axis in axes)
    return replace(ring, forward=ring.forward + calls, backward=ring.backward + calls)


def _moved_share(devices: int) -> float:
    """Share that goes to others of what the busiest device holds in the order of the sequence: one half with two
    devices; with more, at least one device holds neither half for itself."""
    return 0.5 if devices == 2 else 1.0


def _result_bytes(q: LocalTensor, v: LocalTensor) -> float:
    return float(math.prod(q.shape[:-1]) * v.shape[-1] * DTYPE_BYTES[q.dtype])


def balanced_traffic(local: LocalOp) -> tuple[float, float]:
    """Traffic of a ring; and exchanged tensors are packed and laid out: each read and written twice."""
    q, k, v = (local.operand(position) for position in range(3))
    passed = 4 * (bytes_of(q) + (bytes_of(k, v) * q.shape[-2] / k.shape[-2]) + _result_bytes(q, v))
    there, back = ring_traffic(local)
    return there + passed, back + passed


def _gathers(mesh: Mesh, operands: LocalTensors, layouts: Layouts) -> Iterator[Call]:
    """All-gathers of keys and values together along their sequence, inner axes first."""
    sizes = [x for x in operands[1:3] if x is not None]
    full = float(sum(x.bytes for x in sizes))
    for axis in reversed(_sequence_axes(sizes[0], layouts)):
        full *= mesh.sizes[axis]
        yield axis, "all_gather", full


def _sequence_axes(key: LocalTensor, layouts: Layouts) -> list[int]:
    """Axes that shard the sequence of keys, the outermost first."""
    return [axis for axis, dim in shards(layouts[1]) if dim == len(key.shape) - 2]


def _whole(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts) -> float:
    """Bytes of all keys and values, gathered; 0 if they are not."""
    return max(
        (size for _, _, size in gathered_collectives(mesh, op, operands, layouts).forward),
        default=0.0,
    )


def _masked(op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors, mesh: Mesh) -> int:
    """Elements of the causal mask in global positions that a device makes, if queries are sharded."""
    q, k = operands[:2]
    assert q is not None and k is not None
    cut = [axis for axis, dim in shards(layouts[0]) if dim == len(q.shape) - 2]
    columns = k.shape[-2] * math.prod(mesh.sizes[a] for a, dim in shards(layouts[1]) if dim == len(k.shape) - 2)
    return q.shape[-2] * columns if cut and dict(op.attributes).get("is_causal") else 0


def gathered_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Bytes of all keys and values as received and as laid out, before there is a result; the mask as booleans.
    Backward gathers them again, next to their gradients."""
    whole, mask = _whole(mesh, op, operands, layouts), _masked(op, operands, layouts, results, mesh)
    q, k, v = operands[:3]
    assert q is not None
    before = 2 * whole - bytes_of(*results) - ACCUMULATED * q.numel // q.shape[-1] - mask * q.bytes // max(q.numel, 1)
    return Temporary(max(before, whole + mask), max(0.0, 2 * whole - bytes_of(k, v)) if whole else 0.0)


def gathered_keeps(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> KeptTensors:
    """Keys and values packed together, instead of themselves; the mask, to be added to the scores."""
    q = first(operands)
    mask = _masked(op, operands, layouts, results, mesh) * q.bytes / max(q.numel, 1)
    if not _whole(mesh, op, operands, layouts):
        return KeptTensors(more_bytes=mask)
    return KeptTensors((1, 2), None, bytes_of(*operands[1:3]) + mask)


def ring_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Bytes of a block in use and one on its way; of the output while it is rescaled. Backward: the arriving block and
    what one block adds, the gradients of two blocks in float32. Unfused, the scores of one block with two copies."""
    q, k, v = operands[:3]
    assert q is not None and k is not None and v is not None
    block, out = bytes_of(k, v), math.prod(q.shape[:-1]) * (v.shape[-1] + 1) * ACCUMULATED
    scores = 3.0 * ACCUMULATED * math.prod(q.shape[:-1]) * k.shape[-2] if is_unfused(operands) else 0.0
    return Temporary(
        2 * block + 4 * out + scores, 2 * block + 2 * (wide_bytes(k) + wide_bytes(v)) + wide_bytes(q) + scores
    )


def balanced_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Bytes of a ring, or, in the exchange, of queries, keys and values packed and received, plus those laid out."""
    ring, moved = ring_holds(mesh, op, operands, layouts, results), bytes_of(*operands[:3])
    return Temporary(max(ring.forward, 2 * moved), max(ring.backward, 2 * moved))


def balanced_keeps(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> KeptTensors:
    """Queries, keys, values and the result out of the order of the sequence, instead of those in it."""
    return KeptTensors((0, 1, 2), None, bytes_of(*operands[:3], *results))


def rotation_traffic(op: LocalOp) -> tuple[float, float]:
    """Traffic of a rotation: one half is turned round, then both are put together, either way."""
    half = op.results[0].bytes / 2
    return 2 * half + 4 * half, 2 * half + 4 * half


OPERATORS: dict[str, Operator] = {
    "autoshard.rotate_half": Operator(
        rule="... d -> ... d | whole: d | linear: 0",
        saves=NOTHING,
        bandwidth="elementwise",
        traffic=rotation_traffic,
        spelling="rotate_half({0})",
        result_name="rotated",
    ),
    "aten.scaled_dot_product_attention": Operator(
        rule=attention,
        saves=attention_saves,
        autocast="low",
        order=(0, 2, 1, 3),  # the flash kernels write (batch, sequence, heads, dim)
        work=Work.ATTENTION,
        spelling="F.scaled_dot_product_attention({0}, {1}, {2}"
        "<attn_mask:3><dropout_p=0.0><is_causal=False><scale><enable_gqa=False>)",
        result_name="attention",
        operand_names=("query", "key", "value", "attention_mask"),
        tensor_parallel=TensorParallel(("h", "g", "heads"), (), True),
        split_words={(0, 0): "batch split", (0, 1): "heads split", (0, 2): "query positions split"},
        traced_as=("scaled_dot_product",),
        draws=("dropout_p",),
    ),
    "aten._scaled_dot_product_flash_attention": Operator(autocast="low"),
}
VARIANTS: dict[str, OperatorVariant] = {
    "parallel_attention": OperatorVariant(
        localise=localise_parallel,
        collectives=gathered_collectives,
        widened=attended,
        holds=gathered_holds,
        keeps=gathered_keeps,
    ),
    "random_attention": OperatorVariant(
        localise=localise_random,
        collectives=gathered_collectives,
        widened=attended,
        holds=gathered_holds,
        keeps=gathered_keeps,
    ),
    "ring_attention": OperatorVariant(
        localise=localise_parallel,
        collectives=ring_collectives,
        widened=attended,
        more_traffic=ring_traffic,
        holds=ring_holds,
    ),
    "balanced_ring_attention": OperatorVariant(
        localise=localise_parallel,
        collectives=balanced_collectives,
        exchanges=True,
        widened=attended_by_half,
        more_traffic=balanced_traffic,
        holds=balanced_holds,
        keeps=balanced_keeps,
    ),
    # The whole model in Megatron-Core's order of the sequence, which no rule offers: `autoshard estimate` describes it.
    "reordered_ring_attention": OperatorVariant(
        localise=localise_parallel,
        collectives=ring_collectives,
        widened=attended_balanced,
        more_traffic=ring_traffic,
        holds=ring_holds,
    ),
}
