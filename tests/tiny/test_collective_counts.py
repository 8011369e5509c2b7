"""How many collectives a simulated step has, over how many groups, of how many sizes."""

from __future__ import annotations

from autoshard.simulation.timeline import Event, Timeline
from autoshard.text.plan_summary import CollectiveCount, collective_counts


def event(kind: str, axes: tuple[str, ...], size: float) -> Event:
    return Event("e", "communication x" if kind else "compute", 0.0, 1.0, "forward", size, "", "", None, (), kind, axes)


def test_equal_kinds_over_one_group_are_counted_together() -> None:
    events = (
        event("all_reduce", ("tp",), 8.0), event("", (), 100.0), event("all_reduce", ("tp",), 8.0),
        event("all_reduce", ("tp",), 4.0), event("all_gather", ("tp",), 8.0), event("all_reduce", ("dp", "tp"), 8.0),
    )  # fmt: skip
    timeline = Timeline(events, 6.0, (), (), 0.0, 0.0, (), 0.0)
    assert collective_counts(timeline) == {
        ("all_reduce", ("tp",)): CollectiveCount(3, 2, 20.0),
        ("all_gather", ("tp",)): CollectiveCount(1, 1, 8.0),
        ("all_reduce", ("dp", "tp")): CollectiveCount(1, 1, 8.0),
    }
