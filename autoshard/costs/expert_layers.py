"""Seconds of a mixture of experts on one device: batched products over the experts there, rows spread evenly."""

from __future__ import annotations

from dataclasses import replace

from autoshard.cluster.hardware import Hardware
from autoshard.costs.compute import local_op_seconds
from autoshard.ir.graph import Op
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.rules.operators.experts import imbalance

EXPERTS = "autoshard.experts"
Operands = tuple[LocalTensor | None, ...]


def expert_rows(op: Op, operands: Operands, variant: str) -> float:
    """Number of pairs of token and expert that one device works on: those of its tokens where these travel, else those
    of its experts."""
    x, up, _, chosen, _ = operands[:5]
    assert x is not None and up is not None and chosen is not None
    experts = op.attribute("experts")
    assert isinstance(experts, int)
    pairs = float(x.shape[0] * chosen.shape[1])
    if variant:  # experts are cut: the fullest device
        pairs *= imbalance(op)
    return pairs if variant == "dispatched_experts" else pairs * up.shape[0] / max(experts, 1)


def experts_seconds(hardware: Hardware, op: Op, operands: Operands, variant: str) -> tuple[float, float]:
    """Forward and backward: pairs gathered, two products, the activation between them, pairs weighted and summed."""
    x, up, down = operands[:3]
    assert x is not None and up is not None and down is not None
    if len(operands) > 5:  # with biases, weights are (in, out)
        up, down = (replace(w, shape=(w.shape[0], w.shape[2], w.shape[1])) for w in (up, down))
    experts, inner, size = up.shape
    rows = -(-int(expert_rows(op, operands, variant)) // max(experts, 1))
    gathered = LocalTensor((experts, rows, size), x.dtype, True)
    first = LocalTensor((experts, rows, inner), x.dtype, True)
    second = LocalTensor((experts, rows, down.shape[2]), x.dtype, True)
    last = LocalTensor((experts, rows, down.shape[1]), x.dtype, True)
    steps = (
        LocalOp("aten.mul", (gathered,), (gathered,)),
        LocalOp("aten.bmm", (gathered, LocalTensor((experts, size, inner), up.dtype, up.requires_grad)), (first,)),
        LocalOp("aten.mul", (first, second), (second,)),
        LocalOp(
            "aten.bmm", (second, LocalTensor((experts, *down.shape[:0:-1]), down.dtype, down.requires_grad)), (last,)
        ),
        LocalOp("aten.mul", (last, last), (last,)),
    )
    seconds = [local_op_seconds(hardware, step) for step in steps]
    return sum(forward for forward, _ in seconds), sum(backward for _, backward in seconds)
