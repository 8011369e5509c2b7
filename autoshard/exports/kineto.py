"""A step as `torch.profiler` would record it on one rank, for Perfetto and Holistic Trace Analysis.

Each kernel has the operator and the launch that started it, linked by a correlation id; collectives are named like
NCCL's kernels and carry Kineto's arguments; a `ProfilerStep#n` encloses each of several equal steps (readers drop the
last one).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard.exports.chakra import group_of
from autoshard.ir.graph import DTYPE_BYTES
from autoshard.ir.mesh import Mesh
from autoshard.redistribute import CARRIED
from autoshard.simulation.timeline import Event, Timeline
from autoshard.units import MICROSECONDS

STEPS = 3
ELEMENT_BYTES = DTYPE_BYTES["float32"]


def profiler_trace(timeline: Timeline, mesh: Mesh, rank: int, dispatch_seconds: float = 0.0) -> dict[str, Any]:
    """Chrome trace JSON of `STEPS` steps on `rank`; times in microseconds."""
    streams = {name: 7 + number for number, name in enumerate(timeline.streams)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} (simulated)"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
            for name, number in streams.items()
        ),
    ]
    for step in range(STEPS):
        begin = step * timeline.step_seconds
        events.append(_annotation(step, begin, timeline.step_seconds))
        for number, event in enumerate(timeline.events):
            correlation = step * len(timeline.events) + number + 1
            events += _recorded(event, begin, correlation, streams[event.stream], mesh, rank, dispatch_seconds)
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": mesh.size},
        "deviceProperties": [{"id": rank, "name": "simulated"}],
        "traceEvents": events,
    }


def _annotation(step: int, begin: float, seconds: float) -> dict[str, Any]:
    return _span("user_annotation", f"ProfilerStep#{step}", begin, seconds, 0, 0, {})


def _recorded(
    event: Event, begin: float, correlation: int, stream: int, mesh: Mesh, rank: int, dispatch_seconds: float
) -> Iterator[dict[str, Any]]:
    """Events of the operator, of the launch inside it, and of the kernel."""
    shown = min(max(dispatch_seconds, 1e-6), event.duration_seconds or 1e-6)
    start = begin + event.start_seconds
    issued = max(begin, start - shown)
    ids = {"External id": correlation, "correlation": correlation}
    yield _span("cpu_op", _operator(event), issued, shown, 0, 0, {"External id": correlation, **_about(event)})
    yield _span("cuda_runtime", "cudaLaunchKernel", issued, shown / 2, 0, 0, ids)
    kernel = {"stream": stream, "device": rank, **ids, **_about(event), **_collective(event, mesh, rank)}
    yield _span("kernel", _kernel(event), start, event.duration_seconds, rank, stream, kernel)


def _span(
    category: str, name: str, start: float, seconds: float, process: int, thread: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": process, "tid": thread,
        "ts": start * MICROSECONDS, "dur": seconds * MICROSECONDS, "args": arguments,
    }  # fmt: skip


def _operator(event: Event) -> str:
    return f"c10d::{CARRIED[event.collective].recorded}_" if event.collective else event.name


def _kernel(event: Event) -> str:
    return CARRIED[event.collective].kernel if event.collective else event.name


def _about(event: Event) -> dict[str, Any]:
    return {"module": event.module, "reason": event.reason, "phase": event.phase}


def _collective(event: Event, mesh: Mesh, rank: int) -> dict[str, Any]:
    if not event.collective:
        return {}
    group = group_of(mesh, event.axes, rank)
    elements = int(event.bytes) // ELEMENT_BYTES
    return {
        "Collective name": CARRIED[event.collective].recorded,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "dtype": "Float",
        "Group size": len(group),
        "Process Group Name": "+".join(event.axes),
        "Process Group Ranks": str(list(group)),
    }
