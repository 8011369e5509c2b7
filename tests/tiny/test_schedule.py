"""The schedule of one device: streams, links, the host and computation beside communication."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.simulation.stream_schedule import Schedule, StreamTask
from autoshard.simulation.timeline import COMPUTE, axis_stream


def compute(seconds: float, beside: bool = False) -> StreamTask:
    return StreamTask("c", (COMPUTE,), seconds, "forward", 0.0, "", "", beside=beside)


def talk(seconds: float, *axes: str, link: str = "NVLink", beside: bool = False) -> StreamTask:
    streams = tuple(map(axis_stream, axes))
    return StreamTask("t", streams, seconds, "forward", 0.0, "", "", None, beside, "all_reduce", axes, link)


tasks = st.one_of(
    st.builds(compute, st.floats(0, 3), st.booleans()),
    st.builds(lambda s, axis, link, b: talk(s, axis, link=link, beside=b), st.floats(0.1, 3),
              st.sampled_from(["dp", "tp"]), st.sampled_from(["NVLink", "InfiniBand"]), st.booleans()),
)  # fmt: skip


def placed(given_tasks: list[StreamTask], dispatch: float = 0.0, slowdown: float = 0.0) -> Schedule:
    schedule = Schedule(dispatch, slowdown)
    schedule.run_in_order(given_tasks)
    return schedule


@settings(max_examples=150, deadline=None)
@given(st.lists(tasks, max_size=12), st.floats(0, 1), st.floats(0, 0.5))
def test_nothing_overlaps_on_a_stream_or_link_and_nothing_starts_before_it_is_issued(
    given_tasks: list[StreamTask], dispatch: float, slowdown: float
) -> None:
    schedule = placed(given_tasks, dispatch, slowdown)
    timed = [task for task in given_tasks if task.seconds > 0]
    assert len(schedule.events) == len(timed)
    rows: dict[str, list[tuple[float, float]]] = {}
    for task, event in zip(timed, schedule.events, strict=True):
        issued = dispatch * (1 + given_tasks.index(task))
        assert event.start_seconds >= issued * (1 - 1e-12)
        longest = task.seconds * (1 + (0 if task.collective else slowdown))
        assert task.seconds <= event.duration_seconds * (1 + 1e-12) and event.duration_seconds <= longest * (1 + 1e-9)
        for row in (*task.streams, *([f"link {task.link}"] if task.link else [])):
            rows.setdefault(row, []).append((event.start_seconds, event.end_seconds))
    for spans in rows.values():
        assert all(end <= start * (1 + 1e-12) + 1e-12 for (_, end), (start, _) in pairwise(sorted(spans)))


@settings(max_examples=60, deadline=None)
@given(st.lists(tasks, min_size=1, max_size=8), st.floats(0.01, 1))
def test_a_slower_host_or_interference_never_helps(given_tasks: list[StreamTask], amount: float) -> None:
    fast = max((e.end_seconds for e in placed(given_tasks).events), default=0.0)
    for slow in (placed(given_tasks, dispatch=amount), placed(given_tasks, slowdown=amount)):
        assert max((e.end_seconds for e in slow.events), default=0.0) >= fast * (1 - 1e-12)


def test_in_order_means_one_after_the_other() -> None:
    events = placed([compute(1.0), talk(2.0, "tp"), compute(1.0)]).events
    assert [event.start_seconds for event in events] == [0.0, 1.0, 3.0]


def test_beside_means_together_and_slower() -> None:
    """In a second beside communication two thirds of a second of computation are done, whichever was placed first."""
    schedule = placed([compute(2.0), talk(1.0, "tp", beside=True)], slowdown=0.5)
    computed, talked = schedule.events
    assert (computed.start_seconds, talked.start_seconds) == (0.0, 0.0)
    assert computed.duration_seconds == pytest.approx(2 + 1 / 3)
    first_talk = placed([talk(1.0, "tp"), compute(2.0, beside=True)], slowdown=0.5)
    assert first_talk.events[1].duration_seconds == pytest.approx(2 + 1 / 3)


def test_what_stands_beside_a_computation_takes_turns() -> None:
    """The blocks of a ring over two axes go along one of them at a time; what comes next waits for all of them."""
    ring = [talk(2.0, "sp", beside=True), talk(1.0, "dp", link="InfiniBand", beside=True)]
    events = placed([compute(1.0), compute(1.5), *ring, compute(1.0)]).events
    assert [event.start_seconds for event in events] == [0.0, 1.0, 1.0, 3.0, 4.0]


def test_two_axes_on_one_link_take_turns() -> None:
    first, second = talk(1.0, "dp"), talk(1.0, "tp", beside=True)
    assert [e.start_seconds for e in placed([first, second]).events] == [0.0, 1.0]
    other = second._replace(link="InfiniBand")
    assert [e.start_seconds for e in placed([first, other]).events] == [0.0, 0.0]


def test_views_cost_the_host_alone() -> None:
    schedule = placed([compute(0.0), compute(0.0), compute(1.0)], dispatch=0.25)
    assert [event.start_seconds for event in schedule.events] == [0.75]
