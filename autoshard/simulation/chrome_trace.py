"""A Timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoshard.simulation.timeline import Event, Timeline
from autoshard.system.files import write_text

PROCESS = 0
MICROSECONDS = 1e6


def chrome_trace(timeline: Timeline, name: str = "predicted step, every device") -> dict[str, Any]:
    """Names (ph M), events (ph X, `ts` and `dur` in microseconds; a collective over joined axes on the stream of each),
    arrows from a collective to what waits for it (ph s and f), and the memory curve as a counter (ph C)."""
    threads = {stream: number for number, stream in enumerate(timeline.streams)}
    trace = [_metadata("process_name", name, 0)]
    for stream, number in threads.items():
        trace.append(_metadata("thread_name", stream, number))
        trace.append(
            {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": number, "args": {"sort_index": number}}
        )
    trace += [_complete(event, threads[stream]) for event in timeline.events for stream in event.streams]
    trace += _arrows(timeline, threads)
    trace += [_counter(seconds, size) for seconds, size in timeline.memory]
    summary = {"step_seconds": timeline.step_seconds, "peak_bytes": timeline.peak_bytes}
    return {"displayTimeUnit": "ms", "traceEvents": trace, "otherData": summary}


def _metadata(kind: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": thread, "args": {"name": name}}


def _complete(event: Event, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.phase,
        "pid": PROCESS,
        "tid": thread,
        "ts": event.start_seconds * MICROSECONDS,
        "dur": event.duration_seconds * MICROSECONDS,
        "args": {"bytes": event.bytes, "module": event.module, "reason": event.reason},
    }


def _arrows(timeline: Timeline, threads: dict[str, int]) -> list[dict[str, Any]]:
    """From the start of a collective's slice to the start of the slice that waits for it; one number for each arrow."""
    found: list[dict[str, Any]] = []
    for event in timeline.events:
        for place in event.waits:
            before = timeline.events[place]
            if before.collective:
                number = len(found) // 2 + 1
                found.append(_end("s", number, before, threads))
                found.append(_end("f", number, event, threads) | {"bp": "e"})
    return found


def _end(kind: str, number: int, event: Event, threads: dict[str, int]) -> dict[str, Any]:
    """One end of an arrow: inside the slice that it is tied to."""
    return {
        "ph": kind,
        "id": number,
        "name": "waits for",
        "cat": "waits",
        "pid": PROCESS,
        "tid": threads[event.streams[0]],
        "ts": event.start_seconds * MICROSECONDS,
    }


def _counter(seconds: float, size: float) -> dict[str, Any]:
    return {
        "ph": "C",
        "name": "memory",
        "pid": PROCESS,
        "tid": 0,
        "ts": seconds * MICROSECONDS,
        "args": {"bytes": size},
    }


def write(timeline: Timeline, path: Path, name: str = "predicted step, every device") -> None:
    """Writes the trace; a temporary file is renamed, so that nothing half-written is left."""
    write_text(path, json.dumps(chrome_trace(timeline, name), ensure_ascii=False) + "\n")
