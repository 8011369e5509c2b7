"""What it costs to move a tensor of a graph: the terms on which its redistributions are searched."""

from __future__ import annotations

from functools import lru_cache

from autoshard.costs.collective import joint_seconds
from autoshard.graph.model import Graph, Tensor
from autoshard.hardware import Hardware
from autoshard.mesh import Mesh
from autoshard.redistribute import CollectiveSeconds, Pass, Terms


def moving_terms(hardware: Hardware, mesh: Mesh, graph: Graph, tensor: Tensor, all_to_all: bool = True) -> Terms:
    """A parameter that is gathered for use is gathered again in backward: autograd keeps its shard."""
    differentiable = tensor.requires_grad and graph.loss is not None
    stored = any(parameter.tensor == tensor.name for parameter in graph.parameters)
    times = 2.0 if stored and differentiable else 1.0
    seconds = _remembered(hardware, mesh)
    return Terms(tensor.shape, tensor.dtype, mesh, differentiable, seconds, local_pass(hardware), times, all_to_all)


def local_pass(hardware: Hardware) -> Pass:
    """One element-wise kernel that reads and writes memory: a slice, mask, padding, or packing for an exchange."""
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
