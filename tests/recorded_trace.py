"""A simulated step as torch's profiler would have recorded it on a GPU."""

from __future__ import annotations

from typing import Any

from autoshard.exports.kineto import profiler_trace
from autoshard.ir.graph import Graph
from autoshard.ir.program import Compute, Program
from autoshard.simulation import Timeline


def recorded_trace(timeline: Timeline, program: Program, graph: Graph) -> Any:
    """Rank 0's trace, with operators under the names that torch gives them."""
    trace = profiler_trace(timeline, program.mesh, 0)
    for event in trace["traceEvents"]:
        if event.get("cat") == "cpu_op":
            number = timeline.events[(event["args"]["External id"] - 1) % len(timeline.events)].instruction
            instruction = program.instructions[number] if number is not None else None
            if isinstance(instruction, Compute) and "c10d" not in event["name"]:
                event["name"] = graph.by_op[instruction.op].target.replace("aten.", "aten::")
    return trace
