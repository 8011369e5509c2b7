"""Bytes that an operator holds only while its forward or its backward runs, beside operands, results, gradients and
what autograd keeps: local copies inside kernels of several steps, and what a variant of the runtime has received."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autoshard.costs.variants import (
    HALOS,
    Layouts,
    Operands,
    halos,
    is_unfused,
    shards,
    statistics,
    variant_collectives,
)
from autoshard.ir.graph import DTYPE_BYTES, Op
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh

ACCUMULATED = 4  # bytes of an element in float32


@dataclass(frozen=True)
class Temporary:
    """Bytes."""

    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class KeptTensors:
    """What a variant keeps for backward otherwise than the operator itself: nothing of the operands `without`, but
    `extra_bytes` (None: as the operator) beside the others."""

    without: tuple[int, ...] = ()
    extra_bytes: float | None = None
    more_bytes: float = 0.0


def temporary(mesh: Mesh, op: Op, variant: str, operands: Operands, layouts: Layouts, results: Operands) -> Temporary:
    """Of local operands that lie in `layouts`."""
    rule = _VARIANTS.get(variant) if variant else _PLAIN.get(op.target)
    return rule(mesh, op, operands, layouts, results) if rule else Temporary()


def kept(mesh: Mesh, op: Op, variant: str, operands: Operands, layouts: Layouts, results: Operands) -> KeptTensors:
    rule = _KEPT.get(variant) if variant else _PLAIN_KEPT.get(op.target)
    return rule(mesh, op, operands, layouts, results) if rule else KeptTensors()


def _wide(x: LocalTensor) -> float:
    return float(x.numel * max(ACCUMULATED, DTYPE_BYTES[x.dtype]))


def _bytes(*tensors: LocalTensor | None) -> float:
    return float(sum(x.bytes for x in tensors if x is not None))


def _cross_entropy(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> Temporary:
    """Backward goes by way of the gradient of the log-probabilities."""
    return Temporary(0.0, _bytes(operands[0]))


def _first(operands: Operands) -> LocalTensor:
    assert operands[0] is not None
    return operands[0]


# --- cross entropy over a cut vocabulary ---

KEPT_OF_A_ROW = 18  # bytes: column, whether it is here and counts, two weights
USED_OF_A_ROW = 36


def _rows(op: Op, logits: LocalTensor) -> int:
    return logits.numel // max(logits.shape[1 if len(logits.shape) > 1 else 0], 1)


def _parallel_cross_entropy(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> Temporary:
    """Logits less their maximum, beside the softmax that is kept; both in float32. Backward: twice the gradient."""
    logits = _first(operands)
    rounded = logits.bytes != _wide(logits)  # the softmax, as it is kept
    size = _wide(logits) * (2 if rounded else 1)
    return Temporary(size + USED_OF_A_ROW * _rows(op, logits), size + ACCUMULATED * _rows(op, logits))


def _cross_entropy_keeps(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> KeptTensors:
    logits = _first(operands)
    return KeptTensors((1,), float(logits.bytes + KEPT_OF_A_ROW * _rows(op, logits)))


# --- attention along a cut sequence ---


def _whole(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts) -> float:
    """Bytes of all keys and values, gathered; 0 where they are not."""
    return max(
        (size for _, _, size in variant_collectives(mesh, op, "parallel_attention", operands, layouts).forward),
        default=0.0,
    )


def _masked(op: Op, operands: Operands, layouts: Layouts, results: Operands, mesh: Mesh) -> int:
    """Elements of the causal mask in global positions that a device makes, where queries are cut."""
    q, k = operands[:2]
    assert q is not None and k is not None
    cut = [axis for axis, dim in shards(layouts[0]) if dim == len(q.shape) - 2]
    columns = k.shape[-2] * math.prod(mesh.sizes[a] for a, dim in shards(layouts[1]) if dim == len(k.shape) - 2)
    return q.shape[-2] * columns if cut and dict(op.attributes).get("is_causal") else 0


def _gathered(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> Temporary:
    """All keys and values as they come and as they are laid out, before there is a result; the mask as booleans.
    Backward they are gathered again, beside their gradients."""
    whole, mask = _whole(mesh, op, operands, layouts), _masked(op, operands, layouts, results, mesh)
    q, k, v = operands[:3]
    assert q is not None
    before = 2 * whole - _bytes(*results) - ACCUMULATED * q.numel // q.shape[-1] - mask * q.bytes // max(q.numel, 1)
    return Temporary(max(before, whole + mask), max(0.0, 2 * whole - _bytes(k, v)) if whole else 0.0)


def _attention_keeps(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> KeptTensors:
    """Keys and values side by side instead of themselves; the mask, to be added to the scores."""
    q = _first(operands)
    mask = _masked(op, operands, layouts, results, mesh) * q.bytes / max(q.numel, 1)
    if not _whole(mesh, op, operands, layouts):
        return KeptTensors(more_bytes=mask)
    return KeptTensors((1, 2), None, _bytes(*operands[1:3]) + mask)


def _ring(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> Temporary:
    """A block in use and one on its way; the output while it is rescaled. Backward: the block that arrives and what
    one block adds, the gradients of two blocks in float32. Unfused, the scores of one block with two copies."""
    q, k, v = operands[:3]
    assert q is not None and k is not None and v is not None
    block, out = _bytes(k, v), math.prod(q.shape[:-1]) * (v.shape[-1] + 1) * ACCUMULATED
    scores = 3.0 * ACCUMULATED * math.prod(q.shape[:-1]) * k.shape[-2] if is_unfused(operands) else 0.0
    return Temporary(2 * block + 4 * out + scores, 2 * block + 2 * (_wide(k) + _wide(v)) + _wide(q) + scores)


# --- norms and softmax over cut dims ---


def _norm(affine: bool, passes: int) -> Rule:
    """In half precision the input, and what is made of it, in float32. Backward: the gradient before the weight, and
    `passes` products of its size."""

    def rule(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> Temporary:
        x = _first(operands)
        wide = _wide(x) if _wide(x) != x.bytes else 0.0
        there = max(0.0, 2 * (wide - x.bytes)) if wide else 0.0
        between = x.bytes if affine and len(operands) > 1 and operands[1] is not None else 0.0
        return Temporary(there, between + (passes - 1) * _wide(x) + 3 * wide)

    return rule


def _norm_keeps(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> KeptTensors:
    """The standardised input instead of the input, and its scale; no running statistics."""
    x = _first(operands)
    return KeptTensors((0, 3, 4), x.bytes + statistics(op, x)[1] * float(max(ACCUMULATED, DTYPE_BYTES[x.dtype])))


def _softmax(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> Temporary:
    """Backward: one product, in half precision three and the operands in float32."""
    x = _first(operands)
    wide = _wide(x) if _wide(x) != x.bytes else 0.0
    return Temporary((2 * wide if wide else 0.0) + _wide(x) * (op.target == "aten.log_softmax"), _wide(x) + 3 * wide)


# --- images whose height or width is cut ---


def _rows_with_halo(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts) -> tuple[float, float]:
    """Bytes of the rows that a device has with those it fetched, and of all that its windows cover."""
    x = _first(operands)
    fetched = covered = float(x.bytes)
    for axis, dim, reach, padding in halos(mesh, op, operands, layouts):
        rows = max(x.shape[dim], 1)
        ends = 1 if mesh.sizes[axis] == 2 else 0  # with two devices each has an edge of the image
        covered *= (rows + reach) / rows
        fetched *= (rows + max(reach - padding * ends, 0)) / rows
    return fetched, covered


def _halo(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> Temporary:
    """The rows before they are padded; backward the gradient of what is covered, and of the rows."""
    x = _first(operands)
    fetched, covered = _rows_with_halo(mesh, op, operands, layouts)
    padded = fetched if covered > fetched else 0.0
    back = covered + padded - x.bytes if padded else covered
    return Temporary(max(0.0, padded - _bytes(*results)), back if x.requires_grad else 0.0)


def _halo_keeps(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> KeptTensors:
    """What the windows cover instead of the input."""
    return KeptTensors((0,), None, _rows_with_halo(mesh, op, operands, layouts)[1])


def _copied_statistics(mesh: Mesh, op: Op, operands: Operands, layouts: Layouts, results: Operands) -> KeptTensors:
    """The running statistics before the step, as the emitted code copies them."""
    running = operands[3:5] if dict(op.attributes).get("training") else ()
    return KeptTensors((3, 4) if running else (), None, _bytes(*running))


Rule = Callable[[Mesh, Op, Operands, Layouts, Operands], Temporary]
Keeps = Callable[[Mesh, Op, Operands, Layouts, Operands], KeptTensors]
_AFFINE = ("parallel_group_norm", "parallel_layer_norm", "synchronised_batch_norm")
_PLAIN: dict[str, Rule] = {"aten.cross_entropy_loss": _cross_entropy}
_VARIANTS: dict[str, Rule] = {
    "parallel_cross_entropy": _parallel_cross_entropy,
    "parallel_attention": _gathered,
    "random_attention": _gathered,
    "ring_attention": _ring,
    **dict.fromkeys(_AFFINE, _norm(True, 2)),
    "parallel_rms_norm": _norm(True, 1),
    **dict.fromkeys(("parallel_softmax", "parallel_log_softmax"), _softmax),
    **dict.fromkeys(HALOS, _halo),
}
_PLAIN_KEPT: dict[str, Keeps] = {"aten.batch_norm": _copied_statistics}
_KEPT: dict[str, Keeps] = {
    "parallel_cross_entropy": _cross_entropy_keeps,
    "parallel_attention": _attention_keeps,
    "random_attention": _attention_keeps,
    **dict.fromkeys((*_AFFINE, "parallel_rms_norm"), _norm_keeps),
    "halo_convolution": _halo_keeps,
}
