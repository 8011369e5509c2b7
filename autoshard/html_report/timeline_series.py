"""The timeline and the memory as numbers for the page's script, and as tables for readers without it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.code_text import printable
from autoshard.errors import ROWS
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.simulation import Event, Timeline
from autoshard.simulation.memory_curve import MemoryPlan, plan_memory
from autoshard.simulation.step_operators import MOST_EVENTS, StepOperators
from autoshard.units import format_bytes, format_seconds

LEGEND = [
    {"key": "forward", "label": "forward"},
    {"key": "backward", "label": "backward"},
    {"key": "optimizer", "label": "optimizer"},
    {"key": "recompute", "label": "recomputation"},
    {"key": "collective", "label": "communication"},
    {"key": "exposed", "label": "exposed communication"},
]
CATEGORIES = [str(entry["key"]) for entry in LEGEND[:5]]
TICK_SECONDS = 1e-10  # times are whole numbers of these


class NameTable:
    """Texts by number, each once; safe to show as they are."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    def texts(self) -> list[str]:
        return ["\n".join(map(printable, text.split("\n"))) for text in self.numbers]


def series(timeline: Timeline, records: Mapping[int, int] | None = None) -> dict[str, Any]:
    """The events of a step that a device runs once, as one segment."""
    return _drawn([timeline.events], [([0.0], [0])], timeline.streams, timeline.step_seconds, records or {})


def step_series(operators: StepOperators, records: Mapping[int, int]) -> dict[str, Any]:
    """Each segment of a whole step once, and where each stage has it."""
    limited, seconds = operators.within(MOST_EVENTS), operators.timeline.step_seconds
    stages = [([laid.start_seconds for laid in stage], [laid.segment for laid in stage]) for stage in limited.stages]
    return _drawn([segment.events for segment in limited.segments], stages, limited.lanes(), seconds, records)


def _drawn(
    segments: Sequence[Sequence[Event]],
    stages: Sequence[tuple[Sequence[float], Sequence[int]]],
    streams: tuple[str, ...],
    step_seconds: float,
    records: Mapping[int, int],
) -> dict[str, Any]:
    """Columns of the events, by segment in order of start: `start` as differences, `streams` as bits, texts as numbers.

    `stages`: of each its segments in order, with their starts, as differences; `segments`: how many events each has.
    `waits`: events by place in all columns that had to end first, of collectives and those who wait for one. `records`:
    instruction -> number of what is known of its operator; -1 where nothing is.
    """
    names, modules, reasons = NameTable(), NameTable(), NameTable()
    events, starts, waits = list[Event](), list[int](), list[list[int]]()
    for segment in segments:
        order = sorted(range(len(segment)), key=lambda n: (segment[n].start_seconds, n))
        place = {n: index for index, n in enumerate(order, len(events))}
        waits += (_waits(segment[n], segment, place) for n in order)
        starts += differences([ticks(segment[n].start_seconds) for n in order])
        events += (segment[n] for n in order)
    bit = {stream: 1 << index for index, stream in enumerate(streams)}
    return {
        "step": ticks(step_seconds),
        "streams": list(streams),
        "categories": CATEGORIES,
        "segments": [len(segment) for segment in segments],
        "stages": [{"start": differences([*map(ticks, at)]), "segment": [*numbers]} for at, numbers in stages],
        "start": starts,
        "duration": [ticks(event.duration_seconds) for event in events],
        "streams_of": [sum(bit[stream] for stream in event.streams) for event in events],
        "category": [CATEGORIES.index(_category(event)) for event in events],
        "phase": [CATEGORIES.index(event.phase) for event in events],
        "name": [names.number(event.name) for event in events],
        "module": [modules.number(event.module) for event in events],
        "reason": [reasons.number(_reason(event)) for event in events],
        "bytes": [round(event.bytes) for event in events],
        "record": [_record(event, records) for event in events],
        "waits": waits,
        "names": names.texts(),
        "modules": modules.texts(),
        "reasons": reasons.texts(),
    }


def ticks(seconds: float) -> int:
    return round(seconds / TICK_SECONDS)


def differences(numbers: list[int]) -> list[int]:
    """The first, then what each is more than the one before."""
    return [number - before for number, before in zip(numbers, [0, *numbers], strict=False)]


def _record(event: Event, records: Mapping[int, int]) -> int:
    return -1 if event.instruction is None else records.get(event.instruction, -1)


def _waits(event: Event, events: Sequence[Event], place: Mapping[int, int]) -> list[int]:
    """Events that `event` waits for, if either of the two is a collective: the rest runs one after the other."""
    return [place[n] for n in event.waits if event.collective or events[n].collective]


def _category(event: Event) -> str:
    return "collective" if event.collective else event.phase


def _reason(event: Event) -> str:
    """Reason why an event is there. Of an operator the panel says more; its strategy is no word for a reader."""
    over = f"over {' and '.join(event.axes)}" if event.axes else ""
    why = event.reason if event.collective or event.instruction is None else ""
    return "\n".join(text for text in (over, why) if text)


def streams(
    parts: Iterable[tuple[int, Sequence[Event]]], names: tuple[str, ...], step_seconds: float
) -> list[tuple[str, str, str, str]]:
    """(stream, busy, share of the step, events) of parts that run that many times a step; a collective over several
    axes is one of each of their streams."""
    busy: dict[str, list[float]] = {stream: [] for stream in names}
    counts = dict.fromkeys(names, 0)
    for times, events in parts:
        for event in events:
            for stream in event.streams:
                busy[stream].append(event.duration_seconds * times)
                counts[stream] += times
    step = step_seconds or 1.0
    return [
        (stream, format_seconds(seconds), f"{seconds / step:.1%}", str(counts[stream]))
        for stream, seconds in zip(names, map(math.fsum, busy.values()), strict=True)
    ]


def longest(events: Sequence[Event]) -> list[tuple[str, str, str, str, str]]:
    """The longest events: (name, streams, start, duration, bytes)."""
    return [
        (
            event.name,
            " and ".join(event.streams),
            format_seconds(event.start_seconds),
            format_seconds(event.duration_seconds),
            format_bytes(event.bytes, 3) if event.bytes else "",
        )
        for event in sorted(events, key=lambda event: (-event.duration_seconds, event.start_seconds))[:ROWS]
    ]


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
    """Bytes of each kind that are alive at the peak."""
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
