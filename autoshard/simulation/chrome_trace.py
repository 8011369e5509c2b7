"""Timelines as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open: of one device, and of a
whole step: a process per stage, a thread each for its slots, sends, gathers and reductions, and its memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoshard.simulation.pipeline_schedule import Placed
from autoshard.simulation.step_account import OPTIMIZER, ROUNDING, StepAccount
from autoshard.simulation.step_timeline import StepCosts, StepTimeline
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


# --- of a whole step ------------------------------------------------------------------------------------------------

KINDS = {"F": "forward", "B": "backward"}


LANES = ("forward, backward, optimizer", "send", "gather weights", "reduce gradients")
COMPUTE, SEND, GATHER, REDUCE = range(len(LANES))


def step_trace(timeline: StepTimeline, account: StepAccount, name: str = "predicted step") -> dict[str, Any]:
    """Names (ph M), slots and tails (ph X, `ts` and `dur` in microseconds), memory of each stage (ph C, bytes). What a
    slot sends and gathers is a part of it, on a thread of its own."""
    events: list[dict[str, Any]] = []
    for stage in range(timeline.stages):
        events += _named(stage, name, timeline.costs.word)
        for placed in timeline.by_stage[stage]:
            events += _slot(placed, timeline.costs)
        events += _tail(timeline, stage)
        events += (
            {"ph": "C", "name": "memory", "pid": stage, "tid": 0, "ts": at * MICROSECONDS, "args": {"bytes": size}}
            for at, size in timeline.memory[stage]
        )
    for own in timeline.transfers:
        events.append(
            {"ph": "X", "name": own.name, "cat": "send", "pid": own.stage, "tid": SEND,
             "ts": own.start_seconds * MICROSECONDS, "dur": own.duration_seconds * MICROSECONDS, "args": {}}
        )  # fmt: skip
    summary = account.as_dict()
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": summary}


def slot_name(placed: Placed, chunks: int) -> str:
    """`forward 3`, with several chunks `forward 3.1`."""
    chunk = f".{placed.slot.chunk}" if chunks > 1 else ""
    return f"{KINDS[placed.slot.kind]} {placed.slot.micro_batch}{chunk}"


def _named(stage: int, name: str, word: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": stage, "tid": 0, "args": {"name": f"{word} {stage}, {name}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": stage, "tid": 0, "args": {"sort_index": stage}}
    for lane, thread in enumerate(LANES):
        yield {"ph": "M", "name": "thread_name", "pid": stage, "tid": lane, "args": {"name": thread}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": stage, "tid": lane, "args": {"sort_index": lane}}


def _slot(placed: Placed, costs: StepCosts) -> Iterator[dict[str, Any]]:
    """The slot; where it gathers weights first, and hands on its result at its end, that too."""
    number, kind = costs.number(placed.stage, placed.slot.chunk), placed.slot.kind
    name, own = slot_name(placed, costs.chunks), costs.parts[number]
    yield _slice(placed, COMPUTE, name, KINDS[kind], placed.start_seconds, placed.duration_seconds)
    sent = costs.sent_seconds(number) if kind == "F" else own.receive_seconds * (number > 0)
    if sent:
        what = "output" if kind == "F" else "gradient"
        yield _slice(placed, SEND, f"send {what} of {name}", "send", placed.end_seconds - sent, sent)
    gathered = placed.duration_seconds - own.forward_seconds - sent if kind == "F" else 0.0
    if gathered > ROUNDING * placed.duration_seconds:
        yield _slice(placed, GATHER, f"gather weights, {name}", "gather", placed.start_seconds, gathered)


def _slice(placed: Placed, lane: int, name: str, category: str, start: float, seconds: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": placed.stage,
        "tid": lane,
        "ts": start * MICROSECONDS,
        "dur": seconds * MICROSECONDS,
        "args": {"micro_batch": placed.slot.micro_batch, "chunk": placed.slot.chunk},
    }


def _tail(timeline: StepTimeline, stage: int) -> Iterator[dict[str, Any]]:
    own = timeline.costs.stages[stage]
    at = timeline.stage_seconds[stage] - own.tail_seconds
    for name, seconds in own.tail:
        lane = COMPUTE if name == OPTIMIZER else REDUCE
        yield {"ph": "X", "name": name, "cat": "once a step", "pid": stage, "tid": lane, "ts": at * MICROSECONDS,
               "dur": seconds * MICROSECONDS, "args": {}}  # fmt: skip
        at += seconds
