"""Reads a trace written by torch.profiler (Chrome JSON, plain or gzipped) as nested spans."""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoshard.errors import InvalidFileError
from autoshard.system.files import LARGEST_FILE, read_bytes
from autoshard.units import MICROSECONDS

HINT = "a trace as torch.profiler's export_chrome_trace writes it, of one rank: see docs/compare.md"
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError, OverflowError, zlib.error)
STEP, OPTIMIZER = "ProfilerStep", "Optimizer.step"


@dataclass(eq=False)
class TraceSpan:
    """Interval of work of one thread or stream. `inside`: the innermost span of the same thread around it."""

    name: str
    category: str
    thread: tuple[Any, Any]
    start_seconds: float
    seconds: float
    arguments: dict[str, Any]
    inside: TraceSpan | None = None
    children: list[TraceSpan] = field(default_factory=list)

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds

    def around(self) -> Iterator[TraceSpan]:
        """Spans around this one, innermost first."""
        outer = self.inside
        while outer is not None:
            yield outer
            outer = outer.inside

    def within(self) -> Iterator[TraceSpan]:
        """Spans inside this one, at any depth."""
        for child in self.children:
            yield child
            yield from child.within()


def read_trace(path: Path) -> list[TraceSpan]:
    """Spans of the trace file. Raises InvalidFileError if it is not a trace of this format."""
    try:
        content = json.loads(_unpacked(read_bytes(path, LARGEST_FILE)))
        events = content["traceEvents"] if isinstance(content, dict) else content
        spans = [_span(event) for event in events if event.get("ph") == "X" and "dur" in event]
    except OSError as error:
        raise InvalidFileError(f"{path}: {error.strerror or error}", HINT) from error
    except _DAMAGED as error:
        raise InvalidFileError(f"{path}: expected a trace of torch.profiler, got {_words(error)}", HINT) from error
    if not spans:
        raise InvalidFileError(f"{path}: the trace has no events with a duration", HINT)
    return nested(spans)


def _unpacked(raw: bytes) -> bytes:
    """Text of the file, unzipped if it is gzipped; limited, as a small file may unpack to a huge one."""
    if raw[:2] != b"\x1f\x8b":
        return raw
    with gzip.open(io.BytesIO(raw)) as file:
        text = file.read(LARGEST_FILE + 1)
    if len(text) > LARGEST_FILE:
        raise ValueError(f"more than {LARGEST_FILE >> 30} GiB of text")
    return text


def _words(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _span(event: dict[str, Any]) -> TraceSpan:
    if not all(math.isfinite(float(event[key])) for key in ("ts", "dur")):
        raise ValueError(f"an event at {event['ts']} of {event['dur']} us")
    return TraceSpan(
        str(event["name"]), str(event.get("cat", "")), (event.get("pid"), event.get("tid")),
        float(event["ts"]) / MICROSECONDS, float(event["dur"]) / MICROSECONDS, dict(event.get("args") or {}),
    )  # fmt: skip


def nested(spans: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Spans in order of time, each linked to the span around it."""
    ordered = sorted(spans, key=lambda span: (span.start_seconds, -span.seconds))
    open_spans: dict[tuple[Any, Any], list[TraceSpan]] = {}
    for span in ordered:
        stack = open_spans.setdefault(span.thread, [])
        while stack and span.start_seconds >= stack[-1].end_seconds - 1e-9:
            stack.pop()
        if stack:
            span.inside = stack[-1]
            stack[-1].children.append(span)
        stack.append(span)
    return ordered


def step_limits(spans: Iterable[TraceSpan]) -> list[tuple[float, float]]:
    """Start and end of each whole step; if there are several, the first is left out as warm-up.

    By `ProfilerStep#n` if the run marked its steps, else from the end of one optimizer step to the end of the next.
    """
    spans = list(spans)
    marked = [(span.start_seconds, span.end_seconds) for span in spans if span.name.startswith(STEP)]
    if not marked:
        ends = [span.end_seconds for span in spans if span.name.startswith(OPTIMIZER)]
        first = min(span.start_seconds for span in spans)
        marked = list(zip([first, *ends], ends, strict=False))
    if not marked:
        hint = "profile whole steps: with an optimizer of torch, or with the profiler's schedule and its step()"
        raise InvalidFileError("the trace marks no step, neither ProfilerStep#n nor Optimizer.step", hint)
    return marked[1:] or marked
