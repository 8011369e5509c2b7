"""Seconds of a graph operator under a strategy: its local operator, and the collectives inside its variant."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from autoshard.costs.collective import collective_seconds
from autoshard.costs.compute import LocalTensor, local_op, local_op_seconds
from autoshard.graph.model import Graph, Op
from autoshard.hardware import Hardware
from autoshard.layout import Layout, Shard, largest_shape
from autoshard.mesh import Mesh
from autoshard.rules.strategy import Strategy

Operands = tuple[LocalTensor | None, ...]
LOSS_BYTES = 4  # the loss of a row is computed in float32
COUNT_BYTES = 8  # of labels that are not ignored


def op_seconds(hardware: Hardware, mesh: Mesh, graph: Graph, op: Op, strategy: Strategy) -> tuple[float, float]:
    """Forward and backward seconds on the device that holds most; no backward in a graph without a loss."""
    operands, results = _locals(graph, op, strategy, mesh)
    forward, backward = compute_seconds(hardware, graph, op, operands, results, strategy.variant)
    calls = variant_collectives(mesh, strategy.variant, operands, strategy.operands)
    return forward + sum(collective_seconds(hardware, mesh, *call) for call in calls), backward


def compute_seconds(
    hardware: Hardware, graph: Graph, op: Op, operands: Operands, results: tuple[LocalTensor, ...], variant: str = ""
) -> tuple[float, float]:
    """The one formula that search and simulation share: the local operator, without the collectives of a variant."""
    forward, backward = local_op_seconds(
        hardware, local_op(op, operands, results, extra_bytes(graph, op, operands, results), variant)
    )
    return forward, backward if graph.loss is not None else 0.0


def extra_bytes(graph: Graph, op: Op, operands: Operands, results: tuple[LocalTensor, ...]) -> float:
    """What one device saves beside values (masks, statistics, log-probabilities): its part of the largest tensor of the
    operator (of several, the first result)."""
    if not op.saved.extra_bytes:
        return 0.0
    local = zip((*op.results, *op.operands), (*results, *operands), strict=True)
    parts = [(graph.tensor(name).numel, part.numel) for name, part in local if name is not None and part is not None]
    whole, part = max(parts, key=lambda pair: pair[0])
    return op.saved.extra_bytes * part / whole if whole else 0.0


def kept_bytes(graph: Graph, op: Op, strategy: Strategy, mesh: Mesh) -> float:
    """`extra_bytes` under a strategy; 0 in a graph without a loss."""
    return extra_bytes(graph, op, *_locals(graph, op, strategy, mesh)) if graph.loss is not None else 0.0


def _locals(graph: Graph, op: Op, strategy: Strategy, mesh: Mesh) -> tuple[Operands, tuple[LocalTensor, ...]]:
    operands = tuple(
        None if name is None or layout is None else _local(graph, name, layout, mesh)
        for name, layout in zip(op.operands, strategy.operands, strict=True)
    )
    results = tuple(
        _local(graph, name, layout, mesh) for name, layout in zip(op.results, strategy.results, strict=True)
    )
    return operands, results


def _local(graph: Graph, name: str, layout: Layout, mesh: Mesh) -> LocalTensor:
    tensor = graph.tensor(name)
    return LocalTensor(_largest_shape(tensor.shape, layout, mesh), tensor.dtype, tensor.requires_grad)


@lru_cache(maxsize=65536)
def _largest_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    return largest_shape(shape, layout, mesh)


Call = tuple[int, str, float]  # (axis index, kind, full bytes)


def variant_collectives(mesh: Mesh, variant: str, operands: Operands, layouts: tuple[Layout | None, ...]) -> list[Call]:
    """The collectives that a variant's forward makes inside, in order. Backward makes none."""
    inside = _VARIANTS.get(variant)
    return inside(mesh, operands, layouts) if inside else []


def _cross_entropy(mesh: Mesh, operands: Operands, layouts: tuple[Layout | None, ...]) -> list[Call]:
    """Over the vocabulary: the maximum of each row, then three sums of it, stacked. Over rows: the count of labels."""
    logits, layout = operands[0], layouts[0]
    assert logits is not None and layout is not None
    class_dim = 1 if len(logits.shape) > 1 else 0
    rows = math.prod(size for dim, size in enumerate(logits.shape) if dim != class_dim)
    shards = [(axis, p) for axis, p in enumerate(layout.placements) if isinstance(p, Shard)]
    vocabulary = [axis for axis, shard in shards if shard.dim == class_dim]
    calls = [(axis, "all_reduce", float(stacked * rows * LOSS_BYTES)) for stacked in (1, 3) for axis in vocabulary]
    return calls + [(axis, "all_reduce", float(COUNT_BYTES)) for axis, shard in shards if shard.dim != class_dim]


_VARIANTS: dict[str, Callable[[Mesh, Operands, tuple[Layout | None, ...]], list[Call]]] = {
    "parallel_cross_entropy": _cross_entropy,
}
