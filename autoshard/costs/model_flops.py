"""The model's own arithmetic: the numerator of the FLOPs utilisation."""

from __future__ import annotations

from autoshard.cluster.hardware import Hardware
from autoshard.costs.compute import attention_flops, product_flops
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph, Op
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.rules.algebra.float8_products import is_cast
from autoshard.rules.algebra.operator_record import Product, Work
from autoshard.rules.operators import record


def ideal_seconds(graph: Graph, hardware: Hardware, devices: int) -> float:
    """Seconds a step of the whole model takes on `devices` devices at peak FLOP/s; 0 where a peak is not known."""
    try:
        if not hardware.kinds:
            flops = graph.once(flops_by_dtype)
            return sum(amount / hardware.peak_flops(dtype) for dtype, amount in flops.items()) / devices
        first, rate = 0, 0.0
        for kind in hardware.kinds:
            count = max(0, min(devices - first, kind.devices))
            rate += 1 / ideal_seconds(graph, kind.hardware, count) if count else 0.0
            first += kind.devices
        return 1 / rate
    except UsageError:
        return 0.0


def flops_by_dtype(graph: Graph) -> dict[str, float]:
    """FLOPs of a step of the whole model by the dtype that computes them, the most first.

    Matrix products, convolutions and attention, forward, and once more for each operand that needs a gradient
    (attention twice more): recomputation and repeated work do not count, as in PaLM, arXiv:2204.02311, appendix B.
    """
    flops: dict[str, float] = {}
    for op in graph.ops:
        work, whole = record(op.target).work, _whole(graph, op)
        dtype = whole.results[0].dtype
        if work is Work.ATTENTION:
            forward, passes = attention_flops(whole), 2 * any(t.requires_grad for t in whole.operands if t)
        elif isinstance(work, Product):
            forward = product_flops(whole, work)
            passes = sum(whole.operand(position).requires_grad for position in work.multiplied)
            dtype = work.cast_to if is_cast(whole, work) else dtype
        else:
            continue
        flops[dtype] = flops.get(dtype, 0.0) + forward * (1 + passes * (graph.loss is not None))
    return dict(sorted(flops.items(), key=lambda item: -item[1]))


def _whole(graph: Graph, op: Op) -> LocalOp:
    """The op on one device that holds everything."""
    operands = tuple(None if name is None else _tensor(graph, name) for name in op.operands)
    causal = dict(op.attributes).get("is_causal") is True
    return LocalOp(op.target, operands, tuple(_tensor(graph, name) for name in op.results), causal=causal)


def _tensor(graph: Graph, name: str) -> LocalTensor:
    tensor = graph.tensor(name)
    return LocalTensor(tensor.shape, tensor.dtype, tensor.requires_grad)
