"""The model's own arithmetic: the numerator of the FLOPs utilisation."""

from __future__ import annotations

from autoshard.cluster.hardware import Hardware
from autoshard.costs.compute import ATTENTION, PRODUCTS, LocalOp, LocalTensor, attention_flops, product_flops
from autoshard.errors import UsageError
from autoshard.ir.graph import Graph, Op


def ideal_seconds(graph: Graph, hardware: Hardware, devices: int) -> float:
    """Seconds a step of the whole model takes on `devices` devices at peak FLOP/s; 0 where a peak is not known.

    Matrix products, convolutions and attention, forward, and once more for each operand that needs a gradient
    (attention twice more): recomputation and repeated work do not count, as in PaLM, arXiv:2204.02311, appendix B.
    """
    try:
        return sum(_op_seconds(graph, hardware, op) for op in graph.ops) / devices
    except UsageError:
        return 0.0


def _op_seconds(graph: Graph, hardware: Hardware, op: Op) -> float:
    if op.target not in PRODUCTS and op.target not in ATTENTION:
        return 0.0
    whole = _whole(graph, op)
    if op.target in ATTENTION:
        forward, passes = attention_flops(whole), 2 * any(t.requires_grad for t in whole.operands if t)
    else:
        product = PRODUCTS[op.target]
        forward = product_flops(whole, product)
        passes = sum(whole.operand(position).requires_grad for position in product.multiplied)
    return forward * (1 + passes * (graph.loss is not None)) / hardware.peak_flops(whole.results[0].dtype)


def _whole(graph: Graph, op: Op) -> LocalOp:
    """The op on one device that holds everything."""
    operands = tuple(None if name is None else _tensor(graph, name) for name in op.operands)
    causal = dict(op.attributes).get("is_causal") is True
    return LocalOp(op.target, operands, tuple(_tensor(graph, name) for name in op.results), causal=causal)


def _tensor(graph: Graph, name: str) -> LocalTensor:
    tensor = graph.tensor(name)
    return LocalTensor(tensor.shape, tensor.dtype, tensor.requires_grad)
