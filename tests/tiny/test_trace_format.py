"""The trace by the documented rules of its format (Trace Event Format, as ui.perfetto.dev reads it): slices of a thread
nest, every thread has a name, counters are numbers, and both ends of an arrow lie in a slice."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from autoshard.simulation import COMPUTE, chrome_trace
from tests.graphs import mlp_graph
from tests.tiny.test_report import built


def traced(seed: int) -> tuple[Any, list[dict[str, Any]]]:
    timeline = built(mlp_graph(3, 64, 128), seed=seed).timeline
    events: list[dict[str, Any]] = json.loads(json.dumps(chrome_trace(timeline)))["traceEvents"]
    return timeline, events


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == kind]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_slices_of_a_thread_do_not_overlap(seed: int) -> None:
    _, events = traced(seed)
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for event in of(events, "X"):
        assert event["ts"] >= 0 and event["dur"] > 0 and event["name"] and event["cat"]
        by_thread.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))


def test_every_thread_is_named_once_in_order() -> None:
    timeline, events = traced(3)
    names = {event["tid"]: event["args"]["name"] for event in of(events, "M") if event["name"] == "thread_name"}
    assert list(names.values()) == list(timeline.streams) and names[0] == COMPUTE
    assert {event["tid"] for event in of(events, "X")} <= set(names)
    order = {
        event["tid"]: event["args"]["sort_index"] for event in of(events, "M") if event["name"] == "thread_sort_index"
    }
    assert order == {tid: tid for tid in names}


def test_a_stream_is_busy_as_long_as_the_simulation_says() -> None:
    """A joint collective is a slice of each of its streams: their times are what the table counts."""
    timeline, events = traced(3)
    assert any(len(event.axes) > 1 for event in timeline.events)
    busy = dict.fromkeys(range(len(timeline.streams)), 0.0)
    for event in of(events, "X"):
        busy[event["tid"]] += event["dur"] / 1e6
    assert list(busy.values()) == pytest.approx([seconds for _, seconds in timeline.busy_seconds])


def test_the_counter_is_the_memory_curve() -> None:
    timeline, events = traced(2)
    counted = [(event["ts"] / 1e6, event["args"]["bytes"]) for event in of(events, "C")]
    for column in range(2):
        assert [point[column] for point in counted] == pytest.approx([point[column] for point in timeline.memory])
    assert {event["name"] for event in of(events, "C")} == {"memory"}


def test_both_ends_of_an_arrow_lie_in_a_slice() -> None:
    timeline, events = traced(3)
    starts, ends = ({event["id"]: event for event in of(events, kind)} for kind in "sf")
    assert starts.keys() == ends.keys() and len(starts) == len(of(events, "s")) == len(of(events, "f"))
    waits = sum(timeline.events[place].collective != "" for event in timeline.events for place in event.waits)
    assert len(starts) == waits > 0
    slices = of(events, "X")
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"] and end["bp"] == "e"
        for one in (start, end):
            assert any(s["tid"] == one["tid"] and s["ts"] <= one["ts"] < s["ts"] + s["dur"] for s in slices)
