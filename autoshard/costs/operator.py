"""Seconds of a graph operator under a strategy: its local operator, and the collectives inside its variant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from autoshard.cluster.hardware import Hardware
from autoshard.costs.cells import cell_seconds
from autoshard.costs.collective import collective_seconds
from autoshard.costs.compute import gradient_cast_seconds, local_op_seconds
from autoshard.costs.expert_layers import EXPERTS, experts_seconds
from autoshard.costs.host_memory import host_tasks, seconds_of
from autoshard.costs.temporaries import saved_difference
from autoshard.costs.variants import variant_collectives
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Layout, largest_shape
from autoshard.ir.local_op import LocalTensor, local_op
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.algebra.variant_record import Call, Inside, LocalTensors
from autoshard.rules.operators import VARIANTS, record


def op_seconds(hardware: Hardware, mesh: Mesh, graph: Graph, op: Op, strategy: Strategy) -> tuple[float, float]:
    """Forward and backward seconds on the device that holds most; no backward in a graph without a loss."""
    forward, backward = local_seconds(hardware, mesh, graph, op, strategy)
    operands, results = local_tensors(graph, op, strategy, mesh)
    if strategy.host:
        first, last = host_tasks(hardware, graph, op, operands, results, strategy.variant)
        return forward + seconds_of(first, link=True), backward + seconds_of(last, link=True)
    if not strategy.variant:
        return forward, backward
    inside = variant_collectives(mesh, op, strategy.variant, operands, strategy.operands)
    calls = (inside.forward, inside.backward if backward else ())
    there, back = ([(call, collective_seconds(hardware, mesh, *call)) for call in group] for group in calls)
    return with_calls(forward, there, inside), with_calls(backward, back, inside)


def with_calls(computed: float, calls: Iterable[tuple[Call, float]], inside: Inside) -> float:
    """Seconds of a variant with its collectives: those that overlap with it, and those that it waits for."""
    beside, alone = 0.0, 0.0
    for (_, kind, _), seconds in calls:
        beside, alone = (beside + seconds, alone) if kind in inside.beside else (beside, alone + seconds)
    return max(computed, beside) + alone


def local_seconds(hardware: Hardware, mesh: Mesh, graph: Graph, op: Op, strategy: Strategy) -> tuple[float, float]:
    """Seconds without the collectives of a variant or the link to the host, on a mesh of any size."""
    operands, results = local_tensors(graph, op, strategy, mesh)
    return compute_seconds(hardware, graph, op, operands, results, strategy.variant, strategy.host)


def compute_seconds(
    hardware: Hardware,
    graph: Graph,
    op: Op,
    operands: LocalTensors,
    results: tuple[LocalTensor, ...],
    variant: str = "",
    host: bool = False,
) -> tuple[float, float]:
    """The one formula that search and simulation share: the local operator, without the collectives of a variant, or
    what passes the link to the `host`. Cached, as every simulated program asks again."""
    known = graph.once(_computed)
    key = (id(hardware), id(op), operands, results, variant, host)
    if key not in known:
        known[key] = hardware, op, _compute_seconds(hardware, graph, op, operands, results, variant, host)
    return known[key][2]


def _computed(graph: Graph) -> dict[object, tuple[Hardware, Op, tuple[float, float]]]:
    """Cache of seconds, by address of what they are for, which is kept so that no other object gets it."""
    return {}


def _compute_seconds(
    hardware: Hardware,
    graph: Graph,
    op: Op,
    operands: LocalTensors,
    results: tuple[LocalTensor, ...],
    variant: str,
    host: bool,
) -> tuple[float, float]:
    if host:
        first, last = host_tasks(hardware, graph, op, operands, results, variant)
        return seconds_of(first, link=False), seconds_of(last, link=False)
    local = local_op(op, operands, results, extra_bytes(graph, op, operands, results), variant)
    several = experts_seconds if op.target == EXPERTS else cell_seconds if _is_cell(op) else None  # steps
    if several is not None:
        forward, backward = several(hardware, op, operands, variant)
        return forward, backward if graph.loss is not None else 0.0
    known = VARIANTS.get(variant)
    if known and known.widened:
        whole = tuple(None if name is None else graph.tensor(name).shape for name in op.operands)
        local = known.widened(local, whole)
    forward, backward = local_op_seconds(hardware, local)
    if known and known.more_traffic:
        bandwidth = hardware.memory_bandwidth * hardware.constant("memory.default")
        there, back = (size / bandwidth for size in known.more_traffic(local))
        forward, backward = forward + there, backward + back
    return forward, backward if graph.loss is not None else 0.0


def weight_seconds(
    hardware: Hardware, graph: Graph, op: Op, operands: LocalTensors, results: tuple[LocalTensor, ...]
) -> float:
    """Backward seconds of a linear for the gradients of its weight and bias."""
    first = operands[0]
    assert first is not None
    constant = (replace(first, requires_grad=False), *operands[1:])
    shared = gradient_cast_seconds(hardware, local_op(op, operands, results, 0.0, ""))
    return compute_seconds(hardware, graph, op, constant, results)[1] - shared


def extra_bytes(graph: Graph, op: Op, operands: LocalTensors, results: tuple[LocalTensor, ...]) -> float:
    """Bytes that one device saves in addition to values (masks, statistics, log-probabilities): its part of the largest
    tensor of the operator (of several, the first result)."""
    if not op.saved.extra_bytes:
        return 0.0
    if _is_cell(op):
        return op.saved.extra_bytes * results[0].numel / max(graph.tensor(op.results[0]).numel, 1)
    local = zip((*op.results, *op.operands), (*results, *operands), strict=True)
    parts = [(graph.tensor(name).numel, part.numel) for name, part in local if name is not None and part is not None]
    whole, part = max(parts, key=lambda pair: pair[0])
    return op.saved.extra_bytes * part / whole if whole else 0.0


def _is_cell(op: Op) -> bool:
    return record(op.target).cell_weights is not None


def saved_bytes(graph: Graph, op: Op, strategy: Strategy, mesh: Mesh) -> float:
    """Bytes as of `extra_bytes` under a strategy, or what its variant keeps in their place; 0 in a graph without a
    loss, and for what the host keeps."""
    if graph.loss is None or strategy.host:
        return 0.0
    operands, results = local_tensors(graph, op, strategy, mesh)
    extra = saved_difference(mesh, op, strategy.variant, operands, strategy.operands, results).extra_bytes
    return extra_bytes(graph, op, operands, results) if extra is None else extra


def local_tensors(graph: Graph, op: Op, strategy: Strategy, mesh: Mesh) -> tuple[LocalTensors, tuple[LocalTensor, ...]]:
    """Operands and results on the device that holds most."""
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
