"""Costs of moving a tensor of a graph: the terms on which its redistributions are searched."""

from __future__ import annotations

from functools import lru_cache

from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import joint_seconds
from autoshard.ir.graph import Graph, Tensor
from autoshard.ir.mesh import Mesh
from autoshard.redistribute import CollectiveSeconds, Pass, Terms


def moving_terms(hardware: Hardware, mesh: Mesh, graph: Graph, tensor: Tensor, all_to_all: bool = True) -> Terms:
    """Terms of moving a tensor. A weight gathered for use is gathered again in backward, as autograd keeps its shard.
    If it was cast before, its gradient moves in the precision of the parameter."""
    differentiable = tensor.requires_grad and graph.loss is not None
    times = 2.0 if tensor.name in graph.weights and differentiable else 1.0
    seconds, local = _remembered(hardware, mesh), local_pass(hardware)
    high = gradient_dtype(graph, tensor.name)
    return Terms(
        shape=tensor.shape,
        dtype=tensor.dtype,
        mesh=mesh,
        differentiable=differentiable,
        seconds=seconds,
        local=local,
        forward_times=times,
        all_to_all=all_to_all,
        gradient_dtype=high,
    )


def gradient_dtype(graph: Graph, tensor: str) -> str:
    """Dtype in which the gradient of a tensor moves: that of the parameter, if it is a weight."""
    return graph.tensor(graph.weights.get(tensor, tensor)).dtype


def moving_facts(graph: Graph, tensor: Tensor) -> tuple[object, ...]:
    """Facts that the terms depend on: tensors with equal facts move at one price."""
    high, is_weight = gradient_dtype(graph, tensor.name), tensor.name in graph.weights
    return (tensor.shape, tensor.dtype, high, tensor.requires_grad, is_weight)


def local_pass(hardware: Hardware) -> Pass:
    """Pass of one element-wise kernel over memory: a slice, mask, padding, or packing for an exchange."""
    bandwidth = hardware.memory_bandwidth * hardware.constant("memory.elementwise")
    return Pass(hardware.launch_seconds, 1.0 / bandwidth)


@lru_cache(maxsize=64)
def _remembered(hardware: Hardware, mesh: Mesh) -> CollectiveSeconds:
    """`joint_seconds`, each price worked out once: a model's tensors have few sizes."""
    known: dict[tuple[tuple[int, ...], str, float], float] = {}

    def seconds(axes: tuple[int, ...], kind: str, full_bytes: float) -> float:
        key = axes, kind, full_bytes
        if key not in known:
            known[key] = joint_seconds(hardware, mesh, axes, kind, full_bytes)
        return known[key]

    return seconds
