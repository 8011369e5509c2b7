"""The collectives inside the variants of the runtime, forward and backward: what search prices and simulation runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autoshard.ir.graph import DTYPE_BYTES, Op
from autoshard.ir.layout import Layout, Shard
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.ir.mesh import Mesh

Call = tuple[int, str, float]  # (axis index, kind, full bytes)
Operands = tuple[LocalTensor | None, ...]
Layouts = tuple[Layout | None, ...]
LOSS_BYTES = 4  # the loss of a row is computed in float32
COUNT_BYTES = 8  # of labels that are not ignored


@dataclass(frozen=True)
class Inside:
    """In order of execution. `beside`: they run while the operator computes (the blocks of a ring)."""

    forward: tuple[Call, ...] = ()
    backward: tuple[Call, ...] = ()
    beside: bool = False


def variant_collectives(mesh: Mesh, op: Op, variant: str, operands: Operands, layouts: Layouts) -> Inside:
    """The collectives that a variant makes on local operands that lie in `layouts`."""
    inside = COLLECTIVES.get(variant)
    return inside(mesh, op, operands, layouts) if inside else Inside()


def shards(layout: Layout | None) -> Iterator[tuple[int, int]]:
    """(axis, dim) of everything that is cut, in mesh order."""
    if layout is not None:
        yield from ((axis, p.dim) for axis, p in enumerate(layout.placements) if isinstance(p, Shard))


def _cross_entropy(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts) -> Inside:
    """Over the vocabulary: the maximum of each row, then sums of it, stacked. Over rows: the count of labels."""
    logits = operands[0]
    assert logits is not None
    class_dim = 1 if len(logits.shape) > 1 else 0
    rows = math.prod(size for dim, size in enumerate(logits.shape) if dim != class_dim)
    vocabulary = [axis for axis, dim in shards(layouts[0]) if dim == class_dim]
    smoothed, weighted = bool(dict(op.attributes).get("label_smoothing")), len(operands) > 2 and bool(operands[2])
    sums = 2 + smoothed + weighted * (1 + smoothed)
    calls = [(axis, "all_reduce", float(stacked * rows * LOSS_BYTES)) for stacked in (1, sums) for axis in vocabulary]
    counts = [(axis, "all_reduce", float(COUNT_BYTES)) for axis, dim in shards(layouts[0]) if dim != class_dim]
    return Inside((*calls, *counts) if _is_mean(op) else tuple(calls))


def _nll(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts) -> Inside:
    """The count of labels."""
    counts = [(axis, "all_reduce", float(COUNT_BYTES)) for axis, _ in shards(layouts[0])]
    return Inside(tuple(counts) if _is_mean(op) else ())


def _is_mean(op: Op) -> bool:
    return dict(op.attributes).get("reduction", 1) == 1


def halos(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts) -> Iterator[tuple[int, int, int, int]]:
    """(axis, dim, rows that windows reach beyond their own, rows of padding at an edge) of each spatial dim cut."""
    x, given = operands[0], dict(op.attributes)
    assert x is not None
    count = int(op.target[-2])  # spatial dims: conv2d
    weight = operands[1] if len(operands) > 1 else None
    kernel = weight.shape[-count:] if weight is not None else _tuple(given["kernel_size"], count)
    stride, dilation = (_tuple(given.get(name), count) for name in ("stride", "dilation"))
    padding = _tuple(given.get("padding", 0), count)
    for axis, dim in shards(layouts[0]):
        spatial = dim - (len(x.shape) - count)
        if spatial >= 0 and mesh.sizes[axis] > 1:
            reach = max(dilation[spatial] * (kernel[spatial] - 1) + 1 - stride[spatial], 0)
            rows = -(-reach // stride[spatial]) if "transpose" in op.target else reach
            yield axis, dim, rows, padding[spatial]


def _halo(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts) -> Inside:
    """Rows at the edges of each cut dim, to the neighbours; their gradients come back. Uneven cuts may need a row
    more than `span - stride`."""
    x = operands[0]
    assert x is not None
    calls = []
    for axis, dim, rows, _ in halos(mesh, op, operands, layouts):
        sent = x.bytes / max(x.shape[dim], 1) * rows * (0.5 if mesh.sizes[axis] == 2 else 1.0)
        calls.append((axis, "all_to_all", sent * mesh.sizes[axis] / (mesh.sizes[axis] - 1)))
    back = calls if x.requires_grad else []
    return Inside(tuple(call for call in calls if call[2]), tuple(call for call in reversed(back) if call[2]))


def _tuple(value: object, count: int) -> tuple[int, ...]:
    if isinstance(value, tuple) and value:
        return tuple(value) * (count if len(value) == 1 else 1)
    return (value if isinstance(value, int) else 1,) * count


def attended(local: LocalOp, whole: tuple[tuple[int, ...] | None, ...]) -> LocalOp:
    """What a device computes that brings the keys together: its queries on all of them. Under a causal mask the last
    device is the busiest, and its queries, the last of the `whole` ones, see all but half of its own share."""
    q, k, v = (local.operand(position) for position in range(3))
    assert whole[0] is not None and whole[1] is not None
    rows, columns = q.shape[-2], whole[1][-2]
    causal = local.causal and rows == whole[0][-2]
    if local.causal and not causal:
        columns = min(columns, max(whole[0][-2] - rows // 2, 1))
    key, value = (replace(x, shape=(*x.shape[:-2], columns, x.shape[-1])) for x in (k, v))
    return replace(local, operands=(q, key, value, *local.operands[3:]), causal=causal)


def is_unfused(operands: Operands) -> bool:
    """Whether a ring makes scores: no fused kernel takes a mask, or float32."""
    masked = len(operands) > 3 and operands[3] is not None
    return masked or (operands[0] is not None and operands[0].dtype not in ("bfloat16", "float16"))


def unfused_bytes(local: LocalOp) -> tuple[float, float]:
    """What a ring reads and writes of its scores, in float32, forward and backward, where no fused kernel takes them:
    with a mask, and not in half precision."""
    if local.variant != "ring_attention" or not is_unfused(local.operands):
        return 0.0, 0.0
    scores = 4.0 * math.prod(local.operand(0).shape[:-1]) * local.operand(1).shape[-2]
    return 10 * scores, 15 * scores


def _gathered_attention(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts) -> Inside:
    """Keys and values in one all-gather, inner axes first; backward gathers again and scatters their gradients."""
    sizes = [x for x in operands[1:3] if x is not None]
    axes = _sequence_axes(layouts[1], sizes)
    full = float(sum(x.bytes for x in sizes))
    calls: list[Call] = []
    back: list[Call] = []
    for axis in reversed(axes):
        full *= mesh.sizes[axis]
        calls.append((axis, "all_gather", full))
        back.insert(0, (axis, "reduce_scatter", full))
    return Inside(tuple(calls), (*calls, *back))


def _ring_attention(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts) -> Inside:
    """A block passes every device once (an all-gather's traffic); backward it takes its gradients, in float32, along,
    which also go home."""
    sizes = [x for x in operands[1:3] if x is not None]
    axes = _sequence_axes(layouts[1], sizes)
    full = float(sum(x.bytes for x in sizes))
    calls: list[Call] = []
    back: list[Call] = []
    for axis in reversed(axes):
        full *= mesh.sizes[axis]
        wide = full * max(4 / DTYPE_BYTES[sizes[0].dtype], 1)
        calls.append((axis, "all_gather", full))
        back += [(axis, "all_gather", full), (axis, "all_gather", wide * mesh.sizes[axis] / (mesh.sizes[axis] - 1))]
    return Inside(tuple(calls), tuple(back), beside=True)


def _sequence_axes(layout: Layout | None, keys: list[LocalTensor]) -> list[int]:
    return [axis for axis, dim in shards(layout) if dim == len(keys[0].shape) - 2]


def statistics(op: Op, x: LocalTensor) -> tuple[set[int], int]:
    """The dims that a norm or softmax goes over, and how many of its results a device has (a group norm: at most)."""
    given, rank = dict(op.attributes), len(x.shape)
    shape, groups, dim = given.get("normalized_shape"), given.get("num_groups"), given.get("dim")
    if isinstance(shape, tuple):
        over = set(range(rank - len(shape), rank))
    elif isinstance(groups, int):
        return set(range(1, rank)), x.shape[0] * groups
    elif isinstance(dim, int):
        over = {dim % rank}
    else:
        over = {0, *range(2, rank)}
    return over, math.prod(size for i, size in enumerate(x.shape) if i not in over)


def _norm(gathered: int, reduced: tuple[int, ...], backward: int) -> Callable[[Mesh, Op, Operands, Layouts], Inside]:
    """`gathered` numbers of each device for each result, or all-reduces of `reduced` ones; in backward one all-reduce
    of `backward` numbers."""

    def inside(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts) -> Inside:
        x = operands[0]
        assert x is not None
        over, count = statistics(op, x)
        size = float(count * max(LOSS_BYTES, DTYPE_BYTES[x.dtype]))
        axes = [axis for axis, dim in shards(layouts[0]) if dim in over]
        calls = [(axis, "all_gather", gathered * size * mesh.sizes[axis]) for axis in axes if gathered]
        calls += [(axis, "all_reduce", numbers * size) for numbers in reduced for axis in axes]
        return Inside(tuple(calls), tuple((axis, "all_reduce", backward * size) for axis in axes))

    return inside


SEQUENCE = ("parallel_attention", "random_attention", "ring_attention")


def _experts(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts) -> Inside:
    """Pairs of token and expert to the experts, their results back; backward the gradients, the same ways."""
    x, _, down, chosen, _ = operands[:5]
    assert x is not None and down is not None and chosen is not None
    tokens, experts = ({axis for axis, dim in shards(layout) if dim == 0} for layout in layouts[:2])
    pairs = x.shape[0] * chosen.shape[1]
    width = x.bytes / max(x.numel, 1)
    axes = sorted(tokens & experts)
    there = [(axis, "all_to_all", float(pairs * x.shape[1] * width)) for axis in axes]
    back = [
        (axis, "all_to_all", float(pairs * down.shape[2 if len(operands) > 5 else 1] * width))
        for axis in reversed(axes)
    ]
    return Inside((*there, *back), (*reversed(back), *(reversed(there) if x.requires_grad else ())))


HALOS = ("halo_convolution", "halo_transposed_convolution", "halo_max_pool", "halo_avg_pool")
EXCHANGING = frozenset({*HALOS, "dispatched_experts"})  # variants with an all-to-all inside
COLLECTIVES: dict[str, Callable[[Mesh, Op, Operands, Layouts], Inside]] = {
    "parallel_attention": _gathered_attention,
    "parallel_cross_entropy": _cross_entropy,
    "parallel_nll_loss": _nll,
    **dict.fromkeys(("parallel_group_norm", "parallel_layer_norm", "synchronised_batch_norm"), _norm(2, (), 2)),
    "parallel_rms_norm": _norm(0, (1,), 1),
    **dict.fromkeys(("parallel_softmax", "parallel_log_softmax"), _norm(0, (1, 1), 1)),
    "random_attention": _gathered_attention,
    "ring_attention": _ring_attention,
    "dispatched_experts": _experts,
    **dict.fromkeys(HALOS, _halo),
}
