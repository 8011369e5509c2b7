"""The timeline as numbers for the page's script, and as tables for readers without it."""

from __future__ import annotations

from typing import Any

from autoshard.simulate import COMPUTE, Event, Timeline
from autoshard.units import format_bytes, format_seconds

LEGEND = [
    {"key": "forward", "label": "forward"},
    {"key": "backward", "label": "backward"},
    {"key": "optimizer", "label": "optimizer"},
    {"key": "collective", "label": "communication"},
]
CATEGORIES = [str(entry["key"]) for entry in LEGEND]
LONGEST = 15


def series(timeline: Timeline) -> dict[str, Any]:
    """`events` are [stream, start, duration, name, category, detail], the last four as indices; seconds and bytes."""
    names: dict[str, int] = {}
    details: dict[str, int] = {}
    streams = {stream: index for index, stream in enumerate(timeline.streams)}
    events = [
        [
            streams[event.stream],
            _short(event.start_seconds),
            _short(event.duration_seconds),
            names.setdefault(event.name, len(names)),
            CATEGORIES.index(_category(event)),
            details.setdefault(_detail(event), len(details)),
        ]
        for event in sorted(timeline.events, key=lambda event: event.start_seconds)
    ]
    return {
        "step_seconds": timeline.step_seconds,
        "streams": list(streams),
        "categories": CATEGORIES,
        "names": list(names),
        "details": list(details),
        "events": events,
        "memory": [[_short(seconds), round(size)] for seconds, size in timeline.memory],
    }


def _short(seconds: float) -> float:
    """Nine significant digits: a tenth of a nanosecond of a step of a tenth of a second."""
    return float(f"{seconds:.9g}")


def _category(event: Event) -> str:
    return event.phase if event.stream == COMPUTE else "collective"


def _detail(event: Event) -> str:
    size = format_bytes(event.bytes, 3) if event.bytes else ""
    return "\n".join(text for text in (event.module, event.reason, size, event.phase) if text)


def streams(timeline: Timeline) -> list[tuple[str, str, str, str]]:
    """(stream, busy, share of the step, events)."""
    step = timeline.step_seconds or 1.0
    counts = dict.fromkeys(timeline.streams, 0)
    for event in timeline.events:
        counts[event.stream] += 1
    return [
        (stream, format_seconds(seconds), f"{seconds / step:.1%}", str(counts[stream]))
        for stream, seconds in timeline.busy_seconds
    ]


def longest(timeline: Timeline) -> list[tuple[str, str, str, str]]:
    """The longest events: (name, stream, start, duration)."""
    events = sorted(timeline.events, key=lambda event: (-event.duration_seconds, event.start_seconds))[:LONGEST]
    return [
        (event.name, event.stream, format_seconds(event.start_seconds), format_seconds(event.duration_seconds))
        for event in events
    ]
