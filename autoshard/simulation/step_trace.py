"""A whole step as a Chrome trace: a process per stage, with its slots, its tail and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard.simulation.chrome_trace import MICROSECONDS
from autoshard.simulation.pipeline_schedule import Placed
from autoshard.simulation.step_timeline import StepTimeline

KINDS = {"F": "forward", "B": "backward"}


def step_trace(timeline: StepTimeline, name: str = "predicted step") -> dict[str, Any]:
    """Names (ph M), slots and tails (ph X, `ts` and `dur` in microseconds), memory of each stage (ph C, bytes)."""
    events: list[dict[str, Any]] = []
    for stage in range(timeline.stages):
        events += _named(stage, name)
        events += (_slot(placed, timeline.costs.chunks) for placed in timeline.by_stage[stage])
        events += _tail(timeline, stage)
        events += (
            {"ph": "C", "name": "memory", "pid": stage, "tid": 0, "ts": at * MICROSECONDS, "args": {"bytes": size}}
            for at, size in timeline.memory[stage]
        )
    summary = {"step_seconds": timeline.step_seconds, "peak_bytes": list(timeline.peak_bytes)}
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": summary}


def slot_name(placed: Placed, chunks: int) -> str:
    """`forward 3`, with several chunks `forward 3.1`."""
    chunk = f".{placed.slot.chunk}" if chunks > 1 else ""
    return f"{KINDS[placed.slot.kind]} {placed.slot.micro_batch}{chunk}"


def _named(stage: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": stage, "tid": 0, "args": {"name": f"stage {stage}, {name}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": stage, "tid": 0, "args": {"sort_index": stage}}


def _slot(placed: Placed, chunks: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": slot_name(placed, chunks),
        "cat": KINDS[placed.slot.kind],
        "pid": placed.stage,
        "tid": 0,
        "ts": placed.start_seconds * MICROSECONDS,
        "dur": placed.duration_seconds * MICROSECONDS,
        "args": {"micro_batch": placed.slot.micro_batch, "chunk": placed.slot.chunk},
    }


def _tail(timeline: StepTimeline, stage: int) -> Iterator[dict[str, Any]]:
    own = timeline.costs.stages[stage]
    at = timeline.stage_seconds[stage] - own.tail_seconds
    for name, seconds in own.tail:
        yield {"ph": "X", "name": name, "cat": "once a step", "pid": stage, "tid": 0, "ts": at * MICROSECONDS,
               "dur": seconds * MICROSECONDS, "args": {}}  # fmt: skip
        at += seconds
