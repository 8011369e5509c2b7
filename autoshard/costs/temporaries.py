"""Bytes that an operator holds only while its forward or its backward runs, beside operands, results, gradients and
what autograd keeps: local copies inside kernels of several steps, and what a variant of the runtime has received."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autoshard.costs.compute import LocalTensor
from autoshard.costs.variants import Layouts, Operands, is_unfused, variant_collectives
from autoshard.graph.model import DTYPE_BYTES, Op
from autoshard.mesh import Mesh

ACCUMULATED = 4  # bytes of an element in float32


@dataclass(frozen=True)
class Temporary:
    """Bytes."""

    forward: float = 0.0
    backward: float = 0.0


def temporary(mesh: Mesh, op: Op, variant: str, operands: Operands, layouts: Layouts) -> Temporary:
    """Of local operands that lie in `layouts`."""
    rule = _VARIANTS.get(variant) if variant else _PLAIN.get(op.target)
    return rule(mesh, op, variant, operands, layouts) if rule else Temporary()


def _wide(x: LocalTensor) -> float:
    return float(x.numel * max(ACCUMULATED, DTYPE_BYTES[x.dtype]))


def _cross_entropy(mesh: Mesh, op: Op, variant: str, operands: Operands, layouts: Layouts) -> Temporary:
    """Backward goes by way of the gradient of the log-probabilities."""
    logits = operands[0]
    assert logits is not None
    return Temporary(0.0, float(logits.bytes))


def _parallel_cross_entropy(mesh: Mesh, op: Op, variant: str, operands: Operands, layouts: Layouts) -> Temporary:
    """Logits less their maximum, beside the softmax that is kept; both in float32."""
    logits = operands[0]
    assert logits is not None
    narrow = 0.0 if logits.bytes == _wide(logits) else _wide(logits)  # the softmax before it is rounded
    return Temporary(_wide(logits) + narrow, narrow)


def _gathered(mesh: Mesh, op: Op, variant: str, operands: Operands, layouts: Layouts) -> Temporary:
    """All keys and values beside the shards that were packed for sending; backward their gradients, too."""
    inside = variant_collectives(mesh, op, variant, operands, layouts)
    whole = max((size for _, _, size in inside.forward), default=0.0)
    packed = float(sum(x.bytes for x in operands[1:3] if x is not None)) if whole else 0.0
    return Temporary(whole + packed, 2 * whole)


def _ring(mesh: Mesh, op: Op, variant: str, operands: Operands, layouts: Layouts) -> Temporary:
    """A block in use and one on its way; the output while it is rescaled. Backward: the gradients of both blocks, in
    float32, and what one block adds. Unfused, the scores of one block with two copies."""
    q, k, v = operands[:3]
    assert q is not None and k is not None and v is not None
    block, out = float(k.bytes + v.bytes), math.prod(q.shape[:-1]) * v.shape[-1] * ACCUMULATED
    scores = 3.0 * ACCUMULATED * math.prod(q.shape[:-1]) * k.shape[-2] if is_unfused(operands) else 0.0
    return Temporary(2 * block + 4 * out + scores, 3 * block + 2 * (_wide(k) + _wide(v)) + q.bytes + scores)


Rule = Callable[[Mesh, Op, str, Operands, Layouts], Temporary]
_PLAIN: dict[str, Rule] = {"aten.cross_entropy_loss": _cross_entropy}
_VARIANTS: dict[str, Rule] = {
    "parallel_cross_entropy": _parallel_cross_entropy,
    "parallel_attention": _gathered,
    "random_attention": _gathered,
    "ring_attention": _ring,
}
