"""A whole step of all stages: times, memory of each stage, its trace and its picture."""

from __future__ import annotations

import itertools
import random
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from autoshard.html_report.picture.stages_picture import stages_svg
from autoshard.program.schedules.pipeline_schedule import SCHEDULES, most_in_flight
from autoshard.simulation.chrome_trace import step_trace
from autoshard.simulation.step_account import StepAccount
from autoshard.simulation.step_operators import PartOperators, Segment, step_operators
from autoshard.simulation.step_timeline import PartCosts, StageCosts, StepCosts, live_micro_batches, simulate_step
from autoshard.simulation.timeline import COMPUTE, Event


def costs(schedule: str, stages: int, micro_batches: int, chunks: int, **part: float) -> StepCosts:
    part_costs = PartCosts(**{"forward_seconds": 1.0, "backward_seconds": 2.0, **part})
    return StepCosts(schedule, micro_batches, (part_costs,) * (stages * chunks), (StageCosts(),) * stages)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_step_of_equal_stages_is_the_closed_form(schedule: str, chunks: int) -> None:
    timeline = simulate_step(costs(schedule, 4, 8, chunks))
    assert timeline.step_seconds == pytest.approx(8 * chunks * 3 + 3 * 3)  # a bubble of stages - 1 parts
    assert timeline.busy_seconds(2) == pytest.approx(8 * chunks * 3)


def test_a_hand_made_step_of_two_stages() -> None:
    """F0 (1 s and 0.5 to send), F0 on stage 1 from 1.5; backward there 2.5 to 4.5 and 0.5 to send; tails after."""
    first = PartCosts(1.0, 2.0, saved_bytes=10.0, working_bytes=3.0)
    second = PartCosts(1.0, 2.0, saved_bytes=20.0, received_bytes=4.0, receive_seconds=0.5)
    tails = (StageCosts(100.0, (("reduce", 1.0), ("optimizer", 0.25))), StageCosts(50.0))
    timeline = simulate_step(StepCosts("1f1b", 1, (first, second), tails))
    assert [(p.stage, p.slot.kind, p.start_seconds, p.end_seconds) for p in timeline.placed] == [
        (0, "F", 0.0, 1.5), (1, "F", 1.5, 2.5), (1, "B", 2.5, 5.0), (0, "B", 5.0, 7.0),
    ]  # fmt: skip
    assert timeline.stage_seconds == (8.25, 5.0)
    assert timeline.memory[0] == ((0.0, 104.0), (0.0, 117.0), (1.5, 114.0), (5.0, 117.0), (7.0, 104.0))
    assert timeline.peak_bytes == (117.0, 74.0)  # a buffer for a gradient on the first, for an input on the second


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)])
def test_a_stage_holds_what_its_schedule_has_in_flight(schedule: str, chunks: int) -> None:
    timeline = simulate_step(costs(schedule, 4, 12, chunks, saved_bytes=1.0, received_bytes=1e-3))
    for stage, peak in enumerate(timeline.peak_bytes):
        order = SCHEDULES[schedule](stage, 4, 12, chunks)
        received = sum(most_in_flight(order, chunk) for chunk in range(chunks) if (chunk, stage) != (0, 0))
        given_back = sum((chunk, stage) != (chunks - 1, 3) for chunk in range(chunks))
        low = most_in_flight(order) + received * 1e-3 + given_back * 1e-3
        # An interleaved schedule posts receives before it needs them, and holds what it sent until the step ends
        ahead = {"gpipe": 0.0, "1f1b": 2e-3, "interleaved": (4 + 2 * 12) * chunks * 1e-3}[schedule]
        assert low - 1e-9 <= peak <= low + ahead + 1e-9
        assert live_micro_batches(schedule, 4, 12, chunks)[stage] == pytest.approx(most_in_flight(order) / chunks)


def segment(seconds: float) -> Segment:
    return Segment((Event("op", COMPUTE, 0.0, seconds, "forward", 0.0, "", ""),), seconds)


def test_the_trace_and_the_picture_show_every_stage() -> None:
    part = PartCosts(1e-3, 2e-3, saved_bytes=1e9)
    stages = (StageCosts(1e9, (("optimizer", 5e-3),)),) * 3
    timeline = simulate_step(StepCosts("1f1b", 6, (part,) * 3, stages))
    forward, backward, update = (segment(seconds) for seconds in (1e-3, 2e-3, 5e-3))
    stage_work = PartOperators(forward, backward, forward, backward, update)
    operators = step_operators(timeline, (stage_work,) * 3)
    accounts = tuple(map(operators.account, range(3)))
    trace = step_trace(operators, StepAccount(timeline.step_seconds, accounts))
    slots = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == 0 and e["cat"] != "optimizer"]
    assert len(slots) == 2 * 3 * 6 and {e["pid"] for e in slots} == {0, 1, 2}
    for stage in range(3):
        stage_work = sorted((e["ts"], e["ts"] + e["dur"]) for e in slots if e["pid"] == stage)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(stage_work))
    counters = [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == 0]
    assert max(counters) == timeline.peak_bytes[0]
    root = ElementTree.fromstring(stages_svg(timeline))
    drawn = [e for e in root.iter() if e.tag.endswith("path")]
    assert len(drawn) == 2 * 3 and sum(e.get("d", "").count("M") for e in drawn) == 2 * 3 * 6


def test_a_thousand_devices_are_as_quick_as_their_slots() -> None:
    """64 stages of 16 devices, 512 micro-batches: every slot once; its picture joins what is too narrow to see."""
    timeline = simulate_step(costs("1f1b", 64, 512, 1, saved_bytes=1.0))
    assert len(timeline.placed) == 2 * 64 * 512
    assert timeline.step_seconds == pytest.approx((512 + 63) * 3)
    np.testing.assert_allclose(timeline.peak_bytes, [64 - stage for stage in range(64)])
    assert len(stages_svg(timeline)) < 1_000_000


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_peak_is_the_most_of_the_curve(schedule: str) -> None:
    """With what is held of sends, which the peak counts for all slots at once."""
    draw = random.Random(schedule)
    for _ in range(40):
        stages, chunks = draw.randint(1, 4), draw.randint(1, 3) if schedule == "interleaved" else 1
        count = stages * draw.randint(1, 3)
        received = [draw.uniform(0, 5) for _ in range(stages * chunks + 1)]
        parts = tuple(
            PartCosts(
                draw.uniform(1, 3), draw.uniform(1, 6), received[n] + received[n + 1] + draw.uniform(0, 9),
                draw.uniform(0, 20), received_bytes=received[n],
            )
            for n in range(stages * chunks)
        )  # fmt: skip
        by_stage = tuple(StageCosts(draw.uniform(0, 9)) for _ in range(stages))
        timeline = simulate_step(StepCosts(schedule, count, parts, by_stage))
        for peak, curve in zip(timeline.peak_bytes, timeline.memory, strict=True):
            assert peak == pytest.approx(max(size for _, size in curve))


def begun(gather_seconds: float, schedule: str = "1f1b", stages: int = 2, chunks: int = 1) -> float:
    """Seconds of a step whose parts gather weights once, of which a quarter of what it takes is copies."""
    part_costs = PartCosts(1.0, 2.0, first_seconds=1.0, once_copy_seconds=0.25, gather_seconds=gather_seconds)
    costs = StepCosts(schedule, 2 * stages, (part_costs,) * stages * chunks, (StageCosts(),) * stages)
    return simulate_step(costs).step_seconds


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_weights_of_later_parts_are_gathered_while_their_stage_waits(stages: int, chunks: int) -> None:
    """The first part's gathers are waited for, and what copies take in every part. Of two parts a stage, the second
    part's stand beside the second micro-batch in the first one, once for all stages: each later one waits meanwhile."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    free = simulate_step(
        StepCosts(schedule, 2 * stages, (PartCosts(1.0, 2.0),) * stages * chunks, (StageCosts(),) * stages)
    )
    beside = 0.75 * (chunks > 1)
    assert begun(0.75, schedule, stages, chunks) <= free.step_seconds + 0.75 + 0.25 * stages * chunks + beside + 1e-12
    assert begun(0.75, schedule, stages, chunks) >= free.step_seconds + 0.75 + 0.25


def test_gathers_that_have_not_ended_as_the_input_comes_are_waited_for_and_no_longer_than_before() -> None:
    """The second stage's input comes after the first one's forward, 2 seconds with its own gathers."""
    hidden = begun(2.0)
    assert begun(2.5) == pytest.approx(hidden + 0.5)
    assert begun(2.9) == begun(9.0) == pytest.approx(hidden + 0.75)
