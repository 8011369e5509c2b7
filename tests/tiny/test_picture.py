"""The picture of README.md: drawn from a real timeline, the same file every time."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.picture import draw, spans
from tests.tiny.test_report import built


def test_the_picture(tmp_path: Path) -> None:
    timeline = built().timeline
    for name in ("one.svg", "two.svg"):
        draw(timeline, "a title", tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    words = "".join(ElementTree.parse(tmp_path / "one.svg").getroot().itertext())
    assert all(word in words for word in ("a title", *timeline.streams, "backward", "MiB"))


def test_spans_cover_the_events() -> None:
    timeline = built().timeline
    events = [event for event in timeline.events if event.stream == "compute"]
    drawn = spans(events, timeline.step_seconds)
    assert drawn[0][0] == pytest.approx(events[0].start_seconds * 1e3)
    assert sum(length for _, length in drawn) >= timeline.busy("compute") * 1e3 * 0.999
    assert len(spans(events, 0.0)) >= len(drawn)
