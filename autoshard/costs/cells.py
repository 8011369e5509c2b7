"""Seconds of one step of a recurrent cell on one device: a product with the input, one with the state, the gates."""

from __future__ import annotations

from autoshard.cluster.hardware import Hardware
from autoshard.costs.compute import local_op_seconds
from autoshard.ir.graph import Op
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.rules.operators import record

Operands = tuple[LocalTensor | None, ...]


def cell_seconds(hardware: Hardware, op: Op, operands: Operands, variant: str) -> tuple[float, float]:
    """Forward and backward seconds."""
    first = record(op.target).cell_weights
    assert first is not None
    x, h, w_x, w_h = operands[0], operands[1], operands[first], operands[first + 1]
    assert x is not None and h is not None and w_x is not None and w_h is not None
    gates = LocalTensor((x.shape[0], w_x.shape[0]), x.dtype, True)
    steps = (
        LocalOp("aten.linear", (x, w_x), (gates,)),
        LocalOp("aten.linear", (h, w_h), (gates,)),
        LocalOp("aten.mul", (gates, gates), (gates,)),
    )
    seconds = [local_op_seconds(hardware, step) for step in steps]
    return sum(forward for forward, _ in seconds), sum(backward for _, backward in seconds)
