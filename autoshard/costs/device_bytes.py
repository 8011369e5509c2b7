"""Bytes on the device that holds most, and the seconds of an optimizer step, which memory bandwidth bounds."""

from __future__ import annotations

import math

from autoshard.cluster.hardware import Hardware
from autoshard.costs.host_memory import memory_seconds
from autoshard.ir.graph import DTYPE_BYTES, Graph, Parameter, Tensor
from autoshard.ir.layout import Layout, largest_shape
from autoshard.ir.mesh import Mesh

ON_SERVERS = "on servers"  # the optimizer of a worker, which parameter servers run
# state tensors per parameter, in the parameter's dtype (sgd: no momentum)
OPTIMIZER_MOMENTS = {"adamw": 2, "sgd": 0, ON_SERVERS: 0}
# tensors read or written by a fused step: p g m v -> p m v; p g -> p
OPTIMIZER_PASSES = {"adamw": 7, "sgd": 3, ON_SERVERS: 0}

UNSCALING_PASSES = 2  # gradients of a scaled loss, as float16 needs it: g -> g


def activation_bytes(tensor: Tensor, layout: Layout, mesh: Mesh) -> float:
    return float(math.prod(largest_shape(tensor.shape, layout, mesh)) * DTYPE_BYTES[tensor.dtype])


def is_trained(graph: Graph, parameter: Parameter) -> bool:
    return parameter.trainable and graph.loss is not None


def parameter_bytes(graph: Graph, parameter: Parameter, layout: Layout, mesh: Mesh) -> float:
    """Bytes of a parameter, and if it is trained of its gradient and optimizer state, all stored in `layout`.

    Masters are what the graph holds: float32 under every `--precision`, low-precision copies are casts in the graph.
    """
    return sum(parameter_parts(graph, parameter, layout, mesh))


def parameter_parts(graph: Graph, parameter: Parameter, layout: Layout, mesh: Mesh) -> tuple[float, float, float]:
    """Bytes of (parameter, gradient, optimizer state) in the device's memory."""
    return (0.0, 0.0, 0.0) if layout.host else _parts(graph, parameter, layout, mesh)


def host_bytes(graph: Graph, parameter: Parameter, layout: Layout, mesh: Mesh) -> float:
    """Bytes of all of these in the memory of its host, for one device."""
    return sum(_parts(graph, parameter, layout, mesh)) if layout.host else 0.0


def _parts(graph: Graph, parameter: Parameter, layout: Layout, mesh: Mesh) -> tuple[float, float, float]:
    size = activation_bytes(graph.tensor(parameter.tensor), layout, mesh)
    if not is_trained(graph, parameter):
        return size, 0.0, 0.0
    return size, size, size * OPTIMIZER_MOMENTS[graph.optimizer]


def optimizer_seconds(hardware: Hardware, graph: Graph, parameter: Parameter, layout: Layout, mesh: Mesh) -> float:
    """Seconds to update one parameter. No launch: one fused kernel updates a whole list of parameters."""
    if not is_trained(graph, parameter):
        return 0.0
    passes = OPTIMIZER_PASSES[graph.optimizer] + UNSCALING_PASSES * (graph.precision == "fp16-mixed")
    size = activation_bytes(graph.tensor(parameter.tensor), layout, mesh) * passes
    if layout.host:
        return memory_seconds(hardware, size)
    return size / optimizer_bandwidth(hardware)


def optimizer_bandwidth(hardware: Hardware) -> float:
    """Bytes/s of memory that an optimizer step reaches."""
    return hardware.memory_bandwidth * hardware.share("memory.optimizer")
