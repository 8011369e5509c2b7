"""`autoshard simulate --export`: a simulated step written in another tool's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from autoshard.cluster.hardware import Hardware
from autoshard.errors import UsageError
from autoshard.exports.chakra import execution_trace, group_number, group_of
from autoshard.exports.kineto import profiler_trace
from autoshard.exports.memory_snapshot import memory_snapshot
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.simulation.memory_curve import plan_memory
from autoshard.simulation.timeline import Timeline
from autoshard.system.files import write_bytes, write_errors

Files = Iterator[tuple[str, bytes]]


def _profiler(timeline: Timeline, program: Program, graph: Graph, hardware: Hardware) -> Files:
    for rank in range(program.mesh.size):
        trace = profiler_trace(timeline, program.mesh, rank, hardware.constant("host.dispatch"))
        yield f"rank{rank}.json", json.dumps(trace).encode()


def _chakra(timeline: Timeline, program: Program, graph: Graph, hardware: Hardware) -> Files:
    mesh = program.mesh
    nodes = execution_trace(timeline, mesh)
    for rank in range(mesh.size):
        yield f"step.{rank}.et", nodes
        used = {event.axes for event in timeline.events if event.axes}
        groups = {str(group_number(mesh, axes)): list(group_of(mesh, axes, rank)) for axes in sorted(used)}
        yield f"groups.{rank}.json", json.dumps(groups).encode()


def _memory(timeline: Timeline, program: Program, graph: Graph, hardware: Hardware) -> Files:
    yield "memory.pickle", memory_snapshot(plan_memory(program, graph), timeline.starts)


FORMATS: dict[str, Callable[[Timeline, Program, Graph, Hardware], Files]] = {
    "profiler": _profiler,
    "chakra": _chakra,
    "memory": _memory,
}


def export(
    name: str, folder: Path, timeline: Timeline, program: Program, graph: Graph, hardware: Hardware
) -> list[str]:
    """Writes the files of a format into `folder`, each whole or not at all; returns their names.

    Raises UsageError if `folder` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: --export writes a folder", "-o FOLDER")
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for file, content in FORMATS[name](timeline, program, graph, hardware):
        write_bytes(folder / file, content)
        written.append(file)
    return written
