"""The timeline as numbers for the page's script, and as tables for readers without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.code_text import printable
from autoshard.simulation import COMPUTE, Event, Timeline
from autoshard.simulation.step_account import Busy, apart, without
from autoshard.units import format_bytes, format_seconds

LEGEND = [
    {"key": "forward", "label": "forward"},
    {"key": "backward", "label": "backward"},
    {"key": "optimizer", "label": "optimizer"},
    {"key": "collective", "label": "communication"},
    {"key": "exposed", "label": "exposed communication"},
]
CATEGORIES = [str(entry["key"]) for entry in LEGEND[:4]]
TICK_SECONDS = 1e-10  # times are whole numbers of these
LONGEST = 15


class NameTable:
    """Texts by number, each once; safe to show as they are."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    def texts(self) -> list[str]:
        return ["\n".join(map(printable, text.split("\n"))) for text in self.numbers]


def series(timeline: Timeline, records: Mapping[int, int] | None = None) -> dict[str, Any]:
    """Columns of the events, in order of start: `start` as differences, `streams` as bits, texts as numbers.

    `waits`: events by place that had to end first, of collectives and those who wait for one. `records`: instruction
    -> number of what is known of its operator; -1 where nothing is.
    """
    names, modules, reasons = NameTable(), NameTable(), NameTable()
    order = sorted(range(len(timeline.events)), key=lambda n: (timeline.events[n].start_seconds, n))
    place = {n: index for index, n in enumerate(order)}
    events = [timeline.events[n] for n in order]
    starts = [ticks(event.start_seconds) for event in events]
    bit = {stream: 1 << index for index, stream in enumerate(timeline.streams)}
    return {
        "step": ticks(timeline.step_seconds),
        "streams": list(timeline.streams),
        "categories": CATEGORIES,
        "start": differences(starts),
        "duration": [ticks(event.duration_seconds) for event in events],
        "streams_of": [sum(bit[stream] for stream in event.streams) for event in events],
        "category": [CATEGORIES.index(_category(event)) for event in events],
        "phase": [CATEGORIES.index(event.phase) for event in events],
        "name": [names.number(event.name) for event in events],
        "module": [modules.number(event.module) for event in events],
        "reason": [reasons.number(_reason(event)) for event in events],
        "bytes": [round(event.bytes) for event in events],
        "record": [_record(event, records or {}) for event in events],
        "waits": [_waits(event, timeline, place) for event in events],
        "names": names.texts(),
        "modules": modules.texts(),
        "reasons": reasons.texts(),
    }


def ticks(seconds: float) -> int:
    return round(seconds / TICK_SECONDS)


def differences(numbers: list[int]) -> list[int]:
    """The first, then what each is more than the one before."""
    return [own - before for own, before in zip(numbers, [0, *numbers], strict=False)]


def _record(event: Event, records: Mapping[int, int]) -> int:
    return -1 if event.instruction is None else records.get(event.instruction, -1)


def _waits(event: Event, timeline: Timeline, place: Mapping[int, int]) -> list[int]:
    """What crosses devices and what waits for it: the rest runs one after the other."""
    return [place[n] for n in event.waits if event.collective or timeline.events[n].collective]


def _category(event: Event) -> str:
    return "collective" if event.collective else event.phase


def _reason(event: Event) -> str:
    """Why it is there. Of an operator the panel says more; its strategy is no word for a reader."""
    over = f"over {' and '.join(event.axes)}" if event.axes else ""
    why = event.reason if event.collective or event.instruction is None else ""
    return "\n".join(text for text in (over, why) if text)


def streams(timeline: Timeline) -> list[tuple[str, str, str, str]]:
    """(stream, busy, share of the step, events); a collective over several axes is one of each of their streams."""
    step = timeline.step_seconds or 1.0
    counts = dict.fromkeys(timeline.streams, 0)
    for event in timeline.events:
        for stream in event.streams:
            counts[stream] += 1
    return [
        (stream, format_seconds(seconds), f"{seconds / step:.1%}", str(counts[stream]))
        for stream, seconds in timeline.busy_seconds
    ]


def longest(timeline: Timeline) -> list[tuple[str, str, str, str, str]]:
    """The longest events: (name, streams, start, duration, bytes)."""
    events = sorted(timeline.events, key=lambda event: (-event.duration_seconds, event.start_seconds))[:LONGEST]
    return [
        (
            event.name,
            " and ".join(event.streams),
            format_seconds(event.start_seconds),
            format_seconds(event.duration_seconds),
            format_bytes(event.bytes, 3) if event.bytes else "",
        )
        for event in events
    ]


def exposed_events(timeline: Timeline) -> list[tuple[float, float]]:
    """(start, end) in seconds of the times in which the device communicates and computes nothing, in order."""
    busy = [Busy(event.start_seconds, event.end_seconds) for event in timeline.events if event.stream == COMPUTE]
    talks = [Busy(event.start_seconds, event.end_seconds) for event in timeline.events if event.collective]
    return [(start, end) for start, end, _ in without(apart(talks), apart(busy))]
