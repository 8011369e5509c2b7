"""The memory peak by kind of tensor."""

from __future__ import annotations

import math
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.html_report.timeline_series import NameTable, differences, ticks
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.simulation import Timeline
from autoshard.simulation.memory_curve import MemoryPlan, plan_memory
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


def memory_series(memory: MemoryPlan, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """Columns of the spans: text, kind, bytes, first and last step; `starts`: when each step begins, as differences.

    Tensors that are equal in all but their name stay apart: a click shows each.
    """
    names, kinds = NameTable(), list(KINDS)
    spans = sorted(memory.spans, key=lambda span: (span.start, span.last, kinds.index(span.held.kind), span.held.name))
    return {
        "kinds": kinds,
        "kind_words": list(KINDS.values()),
        "starts": differences([ticks(seconds) for seconds in timeline.starts]),
        "name": [names.number(span.held.name) for span in spans],
        "kind": [kinds.index(span.held.kind) for span in spans],
        "bytes": [round(span.held.bytes) for span in spans],
        "first": differences([span.start for span in spans]),
        "length": [span.last - span.start for span in spans],
        "names": names.texts(),
        "limit": round(plan.capacity_bytes) if math.isfinite(plan.capacity_bytes) else None,
        "peak": timeline.peak_bytes,
    }
