"""One account of a whole step: its parts are what a brute force over time finds, and add up to the step everywhere."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.formulation.planning_context import PlanningContext
from autoshard.html_report.timeline_series import TICK_SECONDS, step_series
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.package import package_files
from autoshard.replay.simulated_plan import ReportExtras, SimulatedPlan, simulate_plan
from autoshard.search.fixed_step import predicted, with_step
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.search.style_plans import style_plans
from autoshard.simulation.chrome_trace import SLOTS
from autoshard.simulation.step_account import BUBBLE, COMPUTED, OTHER, Busy, split
from autoshard.simulation.timeline import COMPUTE, Event, axis_stream
from autoshard.text.plan_summary import as_dict, summary
from autoshard.units import format_bytes, format_seconds
from tests.slow import quick_at

HARDWARE = load_hardware("a100-80g-sxm")
STREAMS = (COMPUTE, axis_stream("dp"), axis_stream("tp"))
TIMES = st.integers(0, 40)
KINDS = {"gathers": "all_gather", "reductions": "all_reduce", "exchanges": "all_to_all", "sends": "send_receive"}


@cache
def graph() -> Graph:
    return transformer_graph(Transformer(4, 256, 8, 1024, 1024), 8, "bf16-mixed", "adamw").graph


@cache
def searched() -> Plan:
    return search(graph(), HARDWARE, SearchRequest(Mesh.parse("tp=2")))


def built(plan: Plan, request: StepRequest) -> SimulatedPlan:
    return simulate_plan(predicted(with_step(plan, graph(), request), graph()), graph(), HARDWARE)


@given(
    st.lists(st.tuples(st.sampled_from(STREAMS), TIMES, TIMES, st.sampled_from(("all_reduce", "all_gather")))),
    TIMES,
    TIMES,
)
def test_a_split_is_what_each_moment_is(spans: list[tuple[str, int, int, str]], one: int, two: int) -> None:
    """Against every moment by itself: computing first, else what is communicated, else nothing."""
    start, end = sorted((one, two))
    events = [
        Event("", stream, min(a, b), abs(a - b), "forward", 0, "", "", collective="" if stream == COMPUTE else kind)
        for stream, a, b, kind in spans
    ]
    seconds = split(events, start, end)
    assert math.fsum(seconds.values()) == pytest.approx(end - start) and min(seconds.values()) >= 0
    at = [
        [e for e in events if e.start_seconds <= moment and e.end_seconds >= moment + 1] for moment in range(start, end)
    ]
    computing = sum(any(e.stream == COMPUTE for e in active) for active in at)
    assert seconds.get("forward", 0) == computing
    assert seconds[OTHER] == sum(not active for active in at)
    for kind in ("all-reduce", "all-gather"):
        only = [
            {e.collective.replace("_", "-") for e in active}
            for active in at
            if not any(e.stream == COMPUTE for e in active)
        ]
        least, most = sum(kinds == {kind} for kinds in only), sum(kind in kinds for kinds in only)
        assert least <= seconds.get(kind, 0) <= most


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 99),
    st.sampled_from(((1, 1, None), (2, 1, "gpipe"), (2, 1, "1f1b"), (4, 1, "1f1b"), (2, 2, "interleaved"))),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((None, "full", "selective")),
)
@pytest.mark.slow
def test_the_parts_of_every_stage_add_up_to_the_step(
    seed: int, cut: tuple[int, int, str | None], groups: int, recompute: str | None
) -> None:
    """Of random programs, schedules and stages; the bubble is what the slots leave, by their own times."""
    stages, chunks, schedule = cut
    plan = random_plan(PlanningContext(graph(), Mesh.parse("dp=2,tp=2"), HARDWARE), seed)
    staged = {"stages": stages, "virtual_stages": chunks, "schedule": schedule} if stages > 1 else {}
    simulated = built(plan, StepRequest(micro_batches=stages * groups, recompute=recompute, **staged))
    account, timeline = simulated.step.account, simulated.step.timeline
    assert account.step_seconds == pytest.approx(simulated.plan.step_seconds, rel=1e-12)
    assert account.peak_bytes == pytest.approx(simulated.plan.step_peak_bytes)
    for number, stage in enumerate((*account.stages, account.mean)):
        assert math.fsum(seconds for _, seconds in stage.parts) == pytest.approx(account.step_seconds, rel=1e-9)
        assert all(seconds > 0 for _, seconds in stage.parts)
        if timeline is not None and number < stages:
            spans = sorted(Busy(p.start_seconds, p.end_seconds) for p in timeline.by_stage[number])
            busy = math.fsum(span.end - span.start for span in spans) + timeline.costs.stages[number].tail_seconds
            assert stage.seconds(BUBBLE) == pytest.approx(account.step_seconds - busy, abs=1e-9 * account.step_seconds)
    if timeline is not None and recompute == "full":
        assert account.mean.seconds("recompute") > 0
    if simulated.step.operators is not None:
        assert_shown(simulated)


def assert_shown(simulated: SimulatedPlan) -> None:
    """What the page draws, as its script reads it, ends with the step, and each stage's lanes add up to its account."""
    assert simulated.step.operators is not None
    account, drawn = simulated.step.account, step_series(simulated.step.operators, {})
    firsts = [sum(drawn["segments"][:n]) for n in range(len(drawn["segments"]))]
    begun = [start for first, size in zip(firsts, drawn["segments"], strict=True)
             for start in itertools.accumulate(drawn["start"][first : first + size])]  # fmt: skip
    ends = []
    costs = simulated.step.operators.timeline.costs
    for number, (expected, stage) in enumerate(zip(account.stages, drawn["stages"], strict=True)):
        sent = sum(costs.sent_seconds(n) + costs.parts[n].receive_seconds * (n > 0)
                   for n in range(number, len(costs.parts), len(costs.stages)))  # fmt: skip
        assert expected.seconds("send-receive") >= sent * costs.micro_batches * (1 - 1e-9)
        events = []
        for at, segment in zip(itertools.accumulate(stage["start"]), stage["segment"], strict=True):
            for n in range(firsts[segment], firsts[segment] + drawn["segments"][segment]):
                bits, phase = drawn["streams_of"][n], drawn["categories"][drawn["phase"][n]]
                lane = drawn["streams"][(bits & -bits).bit_length() - 1]
                kind, time = KINDS.get(lane.split()[0], ""), (at + begun[n], drawn["duration"][n])
                events.append(Event("", lane, *time, phase, 0, "", "", collective=kind))
        ends.append(max(event.end_seconds for event in events) * TICK_SECONDS)
        ticks = split(events, 0, drawn["step"])
        for kind in ("forward", "backward", "recompute", "optimizer"):
            assert ticks.get(kind, 0) * TICK_SECONDS == pytest.approx(expected.seconds(kind), rel=1e-4)
        talks = sum(ticks.get(kind.replace("_", "-"), 0) for kind in set(KINDS.values())) * TICK_SECONDS
        assert talks == pytest.approx(expected.exposed_seconds, rel=1e-3)
    assert max(ends) == pytest.approx(simulated.plan.step_seconds, rel=1e-6) == drawn["step"] * TICK_SECONDS


@pytest.mark.parametrize("chunks", quick_at([1, 2], 1))
def test_weights_that_are_gathered_once_a_step_are_shown(chunks: int) -> None:
    request = StepRequest(micro_batches=4, stages=2, virtual_stages=chunks if chunks > 1 else None)
    plan = with_step(search(graph(), HARDWARE, SearchRequest(Mesh.parse("dp=4"), strategy="fsdp")), graph(), request)
    simulated = simulate_plan(predicted(replace(plan, step=replace(plan.step, zero=1)), graph()), graph(), HARDWARE)
    names = {event.name for segment in simulated.step.operators.segments for event in segment.events}
    assert "copy weights that were gathered ahead" in names
    assert ("gather weights, once a step" in names) == (chunks > 1)
    assert_shown(simulated)


@pytest.mark.parametrize("chunks", quick_at([1, 2], 1))
def test_one_step_and_one_memory_stand_everywhere(chunks: int) -> None:
    request = StepRequest(micro_batches=4, stages=2, virtual_stages=chunks if chunks > 1 else None)
    simulated = built(searched(), request)
    styles = style_plans(simulated.plan, graph(), HARDWARE)
    seconds, size = format_seconds(simulated.plan.step_seconds), format_bytes(simulated.plan.step_peak_bytes)
    text = summary(simulated.plan, graph(), styles, 100, simulated.timeline, simulated.step)
    page = package_files.report_text(simulated, ReportExtras(styles))
    for shown in (text, page):
        assert seconds in shown and size in shown
        for words in ("bubble", "exposed all-reduce" if shown is page else "exposed", "optimizer"):
            assert words in shown
        assert "in the mean" not in shown and format_bytes(simulated.timeline.peak_bytes) not in shown
    fields = as_dict(simulated.plan, graph(), simulated.step.account)
    assert fields["predicted_seconds"] == fields["account"]["step_seconds"] == simulated.plan.step_seconds
    assert fields["predicted_peak_bytes"] == fields["account"]["peak_bytes"]
    trace = json.loads(package_files.package_files(simulated)["timeline.json"])
    assert trace["otherData"] == json.loads(json.dumps(fields["account"]))
    named = {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    lanes = simulated.step.operators.lanes()
    assert {"compute", "sends"} < {*lanes} and any(lane.startswith("reductions") for lane in lanes)
    assert named == {(stage, lane) for stage in range(2) for lane in (SLOTS, *lanes)}
    sending = 1 + lanes.index("sends")
    sends = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == sending]
    assert sends and sum(e["dur"] for e in sends) / 2e6 == pytest.approx(
        simulated.step.account.mean.seconds("send-receive")
    )
    ends = max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X")
    assert ends == pytest.approx(1e6 * simulated.plan.step_seconds)


@pytest.mark.slow
def test_known_styles_are_of_the_same_step() -> None:
    """Each as if it had been asked for with these stages and micro-batches."""
    request = StepRequest(micro_batches=4, stages=2)
    plan = built(searched(), request).plan
    styles = {style.name: style for style in style_plans(plan, graph(), HARDWARE)}
    for name, strategy in (("data parallel", "dp"), ("Megatron", "megatron")):
        alone = search(graph(), HARDWARE, SearchRequest(plan.mesh, strategy=strategy, step=request))
        expected = predicted(replace(alone, step=plan.step), graph())
        assert styles[name].predicted_seconds == pytest.approx(expected.step_seconds, rel=0.02)
        assert styles[name].predicted_peak_bytes == pytest.approx(expected.step_peak_bytes, rel=0.1)


def test_a_step_of_one_micro_batch_has_one_stage() -> None:
    simulated = simulate_plan(searched(), graph(), HARDWARE)
    account = simulated.step.account
    assert simulated.step.timeline is None and len(account.stages) == 1
    assert account.step_seconds == simulated.timeline.step_seconds == searched().predicted_seconds
    assert sum(map(account.mean.seconds, COMPUTED)) == pytest.approx(
        simulated.timeline.busy(COMPUTE) - account.mean.seconds("optimizer"), rel=1e-6
    )
