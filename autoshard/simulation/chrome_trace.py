"""Timelines as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open: of one device, and of a
whole step: a process per stage, a thread each for its slots, computation, sends, gathers and reductions, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autoshard.simulation.step_account import StepAccount
from autoshard.simulation.step_operators import MOST_EVENTS, StepOperators
from autoshard.simulation.timeline import Event, Timeline
from autoshard.units import MICROSECONDS

SLOTS = "micro-batches"  # the first thread of a stage


def chrome_trace(timeline: Timeline, name: str = "predicted step, every device") -> dict[str, Any]:
    """Trace: names (ph M), events (ph X, `ts` and `dur` in microseconds; a collective over joined axes on the stream of
    each), arrows from a collective to what waits for it (ph s and f), and the memory curve as a counter (ph C)."""
    trace = list(_process(0, name, timeline.streams, timeline.events, timeline.memory))
    summary = {"step_seconds": timeline.step_seconds, "peak_bytes": timeline.peak_bytes}
    return {"displayTimeUnit": "ms", "traceEvents": trace, "otherData": summary}


def step_trace(operators: StepOperators, account: StepAccount, name: str = "predicted step") -> dict[str, Any]:
    """Trace as `chrome_trace`, each stage a process; the first thread shows slots and what is done once a step."""
    timeline, shown = operators.timeline, operators.within(MOST_EVENTS // 4)
    lanes, trace = (SLOTS, *operators.lanes()), list[dict[str, Any]]()
    for stage in range(timeline.stages):
        events = [*shown.events_of(shown.stages[stage]), *operators.slots(stage, SLOTS)]
        trace += _process(stage, f"{timeline.costs.word} {stage}, {name}", lanes, events, timeline.memory[stage])
    return {"displayTimeUnit": "ms", "traceEvents": trace, "otherData": account.as_dict()}


def _process(
    process: int, name: str, streams: Sequence[str], events: Sequence[Event], memory: Sequence[tuple[float, float]]
) -> Iterator[dict[str, Any]]:
    threads = {stream: number for number, stream in enumerate(streams)}
    named = {"ph": "M", "pid": process}
    yield {**named, "name": "process_name", "tid": 0, "args": {"name": name}}
    yield {**named, "name": "process_sort_index", "tid": 0, "args": {"sort_index": process}}
    for stream, number in threads.items():
        yield {**named, "name": "thread_name", "tid": number, "args": {"name": stream}}
        yield {**named, "name": "thread_sort_index", "tid": number, "args": {"sort_index": number}}
    yield from (_complete(event, process, threads[stream]) for event in events for stream in event.streams)
    yield from _arrows(events, process, threads)
    for seconds, size in memory:
        at = {"pid": process, "tid": 0, "ts": seconds * MICROSECONDS}
        yield {"ph": "C", "name": "memory", **at, "args": {"bytes": size}}


def _complete(event: Event, process: int, thread: int) -> dict[str, Any]:
    times = {"ts": event.start_seconds * MICROSECONDS, "dur": event.duration_seconds * MICROSECONDS}
    about = {"bytes": event.bytes, "module": event.module, "reason": event.reason}
    return {"ph": "X", "name": event.name, "cat": event.phase, "pid": process, "tid": thread, **times, "args": about}


def _arrows(events: Sequence[Event], process: int, threads: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Arrows from the start of a collective's slice to that of the slice that waits for it; one name for each arrow."""
    pairs = ((events[place], event) for event in events for place in event.waits)
    for number, (before, event) in enumerate(pair for pair in pairs if pair[0].collective):
        for kind, endpoint in (("s", before), ("f", event)):
            at = {"pid": process, "tid": threads[endpoint.streams[0]], "ts": endpoint.start_seconds * MICROSECONDS}
            tied = {"ph": kind, "id": f"{process}.{number}", "name": "waits for", "cat": "waits", **at}
            yield tied | ({"bp": "e"} if kind == "f" else {})
