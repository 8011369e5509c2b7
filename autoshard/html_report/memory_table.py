"""The memory peak by kind of tensor."""

from __future__ import annotations

from autoshard.cluster.hardware import Hardware
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.simulation.memory_curve import plan_memory
from autoshard.units import format_bytes

KINDS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "buffer": "buffers",
    "input": "inputs",
    "activation": "activations",
    "extra": "saved by operators for their backward (masks, statistics)",
    "working": "held by operators and communication while they run",
}


def by_kind(program: Program, graph: Graph, hardware: Hardware) -> list[tuple[str, str, str]]:
    """(kind, size, share of the peak) of what is alive at the peak, in a fixed order."""
    sizes = bytes_by_kind(program, graph, hardware)
    total = sum(sizes.values()) or 1.0
    return [(KINDS[kind], format_bytes(size), f"{size / total:.1%}") for kind, size in sizes.items() if size]


def bytes_by_kind(program: Program, graph: Graph, hardware: Hardware) -> dict[str, float]:
    """What is alive at the peak, for every kind."""
    memory = plan_memory(program, graph, block_bytes=hardware.constant("allocator.block"))
    step = memory.peak_step
    sizes = dict.fromkeys(KINDS, 0.0)
    for span in memory.spans:
        if span.start <= step <= span.last:
            sizes[span.held.kind] += span.held.bytes
    return sizes
