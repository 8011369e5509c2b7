"""The report page: well-formed, self-contained, the same for the same plan, and true to the timeline."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.costs.model_flops import ideal_seconds
from autoshard.emit.model_file import operator_lines
from autoshard.errors import UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.html_report import render
from autoshard.html_report.decision_rows import blocks
from autoshard.html_report.op_records import OtherChoices, op_records
from autoshard.html_report.page import not_modelled, sentences, verdict
from autoshard.html_report.timeline_series import KINDS, TICK_SECONDS, by_kind, memory_series, series, streams
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Compute
from autoshard.package import package_files
from autoshard.replay.simulated_plan import ReportExtras, SimulatedPlan, simulate_plan
from autoshard.rules.granularities import granularities
from autoshard.search.build_plan import Origin
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.search.style_plans import as_json, from_json, style_plans
from autoshard.simulation import Event, Timeline
from autoshard.simulation.memory_curve import plan_memory
from autoshard.simulation.step_account import one_stage
from autoshard.solvers.common.solver_options import Clock
from autoshard.text.account_text import HOST, breakdown, critical_seconds, left_open
from autoshard.text.answer_labels import MEMORY, certainty, gain_words
from autoshard.text.plan_figures import figures
from autoshard.text.plan_labels import unavailable_strategies
from autoshard.text.plan_summary import summary, timeline_summary
from tests.graphs import mlp_graph
from tests.rule_graphs import one_op
from tests.slow import quick_at

VOID = {"meta", "link", "br", "hr", "img", "input", "col"}
PROOF = {
    "passed": True,
    "failure": "",
    "backend": "gloo",
    "ranks": 4,
    "steps": 3,
    "errors": {"gradient": {"tensors": 2, "largest": 3e-15}, "buffer": {"tensors": 0}},
    "reduced": [{"argument": "n_layer", "verified": "2", "planned": "12"}],
}


VERIFIED = ReportExtras(verification=PROOF)


def built(graph: Graph | None = None, mesh: str = "dp=2,tp=2", seed: int | None = None) -> SimulatedPlan:
    graph, hardware = graph or mlp_graph(4, 64, 128), load_hardware("a100-80g-sxm")
    origin = Origin("mlp.py:build")
    if seed is None:
        plan = search(graph, hardware, SearchRequest(Mesh.parse(mesh), origin=origin))
    else:
        plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), hardware), seed, origin=origin)
    return simulate_plan(plan, graph, hardware)


class Checker(HTMLParser):
    """Tags that match, ids that are unique, addresses that are asked for, the text that a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        by_name = dict(attrs)
        self.ids += [by_name["id"] or ""] if "id" in by_name else []
        self.references += (by_name.get("aria-labelledby") or "").split()
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def data_of(html: str) -> dict[str, object]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert match
    return json.loads(match[1])


@pytest.mark.parametrize("seed", quick_at([None, 1, 2], 1))
def test_well_formed_and_self_contained(seed: int | None) -> None:
    html = package_files.report_text(built(seed=seed), None)
    page = checked(html)
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.references) <= set(page.ids)
    assert all(address == "data:," or address.startswith("#") for address in page.addresses)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", html)
    assert page.headings[0] == "h1" and page.headings.count("h1") == 1
    assert html.startswith("<!doctype html>")
    assert "Undefined" not in html and "None" not in " ".join(page.text)


def test_the_same_plan_gives_the_same_page() -> None:
    assert package_files.report_text(built(), VERIFIED) == package_files.report_text(built(), VERIFIED)


def test_a_note_that_begins_with_code_is_not_changed() -> None:
    notes = ["weights are stored", "dp=2 is decided", "place() has no effect", "w2 is whole", "row-wise Adagrad"]
    assert sentences(notes) == [
        "Weights are stored.", "dp=2 is decided.", "place() has no effect.", "w2 is whole.", "Row-wise Adagrad."
    ]  # fmt: skip


def test_names_are_escaped() -> None:
    graph = mlp_graph(1)
    evil = "</script><img src=x onerror=alert(1)>"
    simulated = built(replace(graph, ops=tuple(replace(op, module=evil) for op in graph.ops), modules=()))
    html = package_files.report_text(simulated, None)
    assert "<img" not in html
    assert html.count("</script>") == 2
    assert evil in data_of(html)["modules"]  # type: ignore[operator]


@pytest.mark.parametrize("seed", [None, 2, 3])
def test_the_drawn_events_are_the_timeline(seed: int | None) -> None:
    simulated = built(seed=seed)
    drawn, timeline = series(simulated.timeline), simulated.timeline
    columns = ("start", "duration", "streams_of", "category", "phase", "name", "module", "reason", "bytes", "waits")
    assert {len(drawn[column]) for column in columns} == {len(timeline.events)}
    busy, now = dict.fromkeys(drawn["streams"], 0.0), 0
    rows = zip(*(drawn[column] for column in (*columns[:4], "name")), strict=True)
    for start, duration, bits, category, name in rows:
        now += start
        for index, stream in enumerate(drawn["streams"]):
            busy[stream] += duration * TICK_SECONDS * (bits >> index & 1)
        assert bits and 0 <= now <= now + duration <= drawn["step"] + 1
        assert drawn["names"][name]
        assert (drawn["categories"][category] == "collective") == (bits & 1 == 0)
    assert busy == pytest.approx(dict(timeline.busy_seconds), rel=1e-5)


def test_a_joint_collective_is_on_each_of_its_streams() -> None:
    """In the drawing and in the table of streams: their times and counts agree."""
    timeline = built(mlp_graph(3, 64, 128), seed=3).timeline
    joint = [event for event in timeline.events if len(event.axes) > 1]
    assert joint
    counted = {stream: int(events) for stream, _, _, events in streams([(1, timeline.events)], timeline.streams, 1.0)}
    for stream, seconds in timeline.busy_seconds:
        assert (counted[stream] > 0) == (seconds > 0)
    assert sum(counted.values()) == len(timeline.events) + len(joint)


def test_exposed_communication_is_what_no_computation_covers() -> None:
    def event(stream: str, start: float, end: float, *axes: str) -> Event:
        name = "all_reduce" if axes else ""
        return Event("e", stream, start, end - start, "forward", 1.0, "", "", None, (), name, axes)

    events = (event("compute", 0, 2), event("communication dp", 1, 4, "dp"), event("compute", 3, 3.5),
              event("communication tp", 3.8, 5, "tp"), event("compute", 6, 7))  # fmt: skip
    timeline = Timeline(events, 7.0, (("compute", 3.5), ("communication dp", 3), ("communication tp", 1.2)),
                        (), 0.0, 0.0, (), 0.0)  # fmt: skip
    assert one_stage(timeline).mean.exposed_seconds == pytest.approx((3 - 2) + (5 - 3.5))


def test_memory_stacks_to_the_simulated_curve() -> None:
    """The spans that the page adds up reach the peak, and never more."""
    simulated = built()
    memory = plan_memory(simulated.program, simulated.graph, block_bytes=simulated.hardware.constant("allocator.block"))
    drawn = memory_series(memory, simulated.plan, simulated.timeline)
    levels, first = [0.0] * len(drawn["starts"]), 0
    for begun, length, size in zip(drawn["first"], drawn["length"], drawn["bytes"], strict=True):
        first += begun
        for step in range(first, first + length + 1):
            levels[step] += size
    assert max(levels) == pytest.approx(simulated.timeline.peak_bytes)
    assert levels == pytest.approx(list(memory.bytes))


def test_every_operator_has_a_record_with_its_reasons() -> None:
    simulated = built(mlp_graph(4, 64, 128))
    others = OtherChoices(simulated.plan, simulated.graph, simulated.hardware)
    text = package_files.package_files(simulated)["model_parallel.py"]
    records, instructions = op_records(simulated.plan, simulated.graph, simulated.program, others, text)
    known = [n for n, instruction in enumerate(simulated.program.instructions) if isinstance(instruction, Compute)]
    assert sorted(instructions) == known
    for index in known:
        instruction = simulated.program.instructions[index]
        record = records[instructions[index]]
        assert isinstance(instruction, Compute) and record["operator"] == instruction.target
        assert record["source"].startswith("mlp.py:")
        place, _, call = record["emitted"].partition(", ")
        line = text.splitlines()[int(place.partition(":")[2]) - 1]
        spelt = {"aten.linear": "F.linear(", "aten.relu": "relu(", "aten.mse_loss": "mse_loss("}[instruction.target]
        assert spelt in line and call.endswith(line.strip())
    assert len(records) < len(known)  # equal blocks share


def test_other_choices_cost_what_the_search_says() -> None:
    """The first is the runner-up that the plan itself names, at its price."""
    simulated = built(mlp_graph(4, 64, 128))
    others = OtherChoices(simulated.plan, simulated.graph, simulated.hardware)
    named = 0
    for op in simulated.plan.ops:
        choices, _ = others.of(op.op)
        if op.parts.runner_up:
            assert choices[0].seconds == pytest.approx(op.parts.runner_up_seconds, abs=1e-15)
            named += 1
    assert named


def test_what_a_reader_must_find() -> None:
    simulated = built()
    text = " ".join(checked(package_files.report_text(simulated, VERIFIED)).text)
    for needed in ("mlp.py:build", "dp=2,tp=2", "Predicted step", "MFU", "The answer", "lower bound"):
        assert needed in text
    assert "Verified." in text and "4 gloo processes, float64, 3 steps: largest relative error 3.0e-15" in text
    assert "At reduced sizes: n_layer 2" in text
    assert "autoshard plan mlp.py:build --mesh dp=2,tp=2 --hardware a100-80g-sxm" in text
    assert all(figure.source[:20] in text for figure in simulated.hardware.figures[:3])
    paths = {parameter.tensor: parameter.path for parameter in simulated.graph.parameters}
    moved = [paths.get(move.tensor, move.tensor) for move in simulated.plan.redistributions]
    assert all(re.sub(r"(?<=\.)\d+(?=\.)", "#", name) in text or name in text for name in moved)


def test_verdicts() -> None:
    unknown = verdict(None, "gpt2.py:build"), verdict(None, "gpt2.graph.json")
    assert all(answer["state"] == "unknown" for answer in unknown)
    assert "autoshard verify" in unknown[0]["text"] and "autoshard verify" not in unknown[1]["text"]
    assert verdict(PROOF, "gpt2.py:build")["state"] == "passed"
    part = {"mesh": "dp=8,tp=8", "planned_mesh": "dp=64,tp=8", "unverified": ["64 devices along dp: 8 ran"]}
    said = " On dp=8,tp=8, which stands for dp=64,tp=8. Not verified: 64 devices along dp: 8 ran."
    assert verdict({**PROOF, **part}, "")["text"].endswith(said)
    failed = verdict({**PROOF, "passed": False, "failure": "verification failed: gradient h.0"}, "")
    assert failed == {"state": "failed", "title": "Verification failed.", "text": "verification failed: gradient h.0"}


def test_a_plan_that_was_not_searched_says_so() -> None:
    text = " ".join(checked(package_files.report_text(built(seed=3), None)).text)
    assert "decided by random:3" in text
    assert "no lower bound was proved" in text


def test_the_host_is_called_missing_only_where_the_profile_does_not_have_it() -> None:
    shipped = load_hardware("a100-80g-sxm")
    bare = replace(
        shipped, constants=tuple((key, 0.0 if key == "host.dispatch" else v) for key, v in shipped.constants)
    )
    assert dict(shipped.constants)["host.dispatch"] > 0
    assert "dispatch" not in not_modelled(shipped) and "dispatch time" in not_modelled(bare)


def test_model_flops_of_linears() -> None:
    """Three products (forward, two backward) of 2 * batch * hidden^2, but two where the input needs no gradient."""
    layers, batch, hidden = 3, 8, 16
    hardware = load_hardware("a100-80g-sxm")
    products = 3 * layers - 1
    expected = products * 2 * batch * hidden**2 / hardware.peak_flops("float32") / 4
    assert ideal_seconds(mlp_graph(layers, batch, hidden), hardware, 4) == pytest.approx(expected)


def test_an_unknown_peak_leaves_utilisation_out() -> None:
    hardware = replace(load_hardware("a100-80g-sxm"), peaks=(("float16", 1.0),))
    with pytest.raises(UsageError):
        hardware.peak_flops("float32")
    assert ideal_seconds(mlp_graph(), hardware, 4) == 0.0


def test_memory_by_kind_adds_up() -> None:
    simulated = built()
    rows = by_kind(simulated.program, simulated.graph, load_hardware("a100-80g-sxm"))
    shares = [float(share.rstrip("%")) for _, _, share in rows]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(KINDS) + 0.01)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    """Overlapping streams do not: what is shown beside the step does."""
    timeline = built(seed=2).timeline
    *parts, whole = breakdown(one_stage(timeline))
    shares = [float(share.rstrip("%")) for _, _, share in parts]
    assert whole[2] == "100.0%" and sum(shares) == pytest.approx(100, abs=0.16)
    assert 0 < shares[1] < 100


def test_styles_stand_in_the_answer() -> None:
    simulated = built()
    styles = style_plans(simulated.plan, simulated.graph, simulated.hardware)
    assert [style.name for style in styles] == [
        "data parallel", "FSDP", "HSDP", "Megatron", "Megatron-SP", "FSDP-TP"
    ]  # fmt: skip
    assert all((style.predicted_seconds > 0) != bool(style.reason) for style in styles)  # priced, or why not
    assert [style.name for style in styles if style.reason] == ["Megatron-SP"]  # nothing stands between its layers
    assert styles[0].predicted_peak_bytes > styles[1].predicted_peak_bytes
    text = " ".join(checked(package_files.report_text(simulated, ReportExtras(styles))).text)
    for style in styles:
        assert ("" if style.reason else "vs. ") + style.name in text and gain_words(simulated.plan, style) in text
    assert from_json(json.loads(as_json(styles))) == styles
    with pytest.raises(ValueError, match="no list of styles"):
        from_json({"styles": [{"name": "x"}]})


def test_a_style_that_cannot_be_says_why() -> None:
    """Four samples on eight devices; a weight of one layer that the last axis of three cannot split."""
    simulated = built(mlp_graph(2, 4, 8), "dp=8")
    styles = style_plans(simulated.plan, simulated.graph, simulated.hardware)
    assert all(
        style.predicted_seconds > 0 or gain_words(simulated.plan, style) == style.reason != "" for style in styles
    )
    stopped = Clock(0.0)
    assert {s.reason for s in style_plans(simulated.plan, simulated.graph, simulated.hardware, stopped)} == {
        "not simulated: the search was out of time"
    }


def test_the_bound_that_is_told_is_one_on_the_step() -> None:
    """Where overlap makes the step shorter than the sum of costs, a bound on that sum must not be told of it."""
    simulated = built()
    fields = {"objective_seconds": 2.0, "lower_bound_seconds": 1.9, "level_objective": 1.5, "level_bound": 1.4}
    least = replace(simulated.plan.certificate, **fields)
    plan = replace(simulated.plan, certificate=least, predicted_seconds=1.5)
    words = certainty(plan)
    assert "its simulated step is 1.5 s; the proved lower bound is 1.4 s" in words and "1.9 s" not in words
    text = summary(plan, simulated.graph)
    [row] = [line for line in text.splitlines() if line.startswith("predicted step")]
    assert "1.5 s" in row and "1.9" not in row
    assert all(len(line) <= 80 for line in text.splitlines())


def test_what_a_step_waits_for_adds_up_to_it_and_stands_beside_a_large_gap() -> None:
    sim_plan = built(mlp_graph(12, 64, 128))
    parts = critical_seconds(sim_plan.timeline)
    assert sum(parts.values()) == pytest.approx(sim_plan.timeline.step_seconds, rel=1e-9)
    assert parts[HOST] > 0.5 * sim_plan.timeline.step_seconds, "small operators: the host limits"
    simulated = " ".join(timeline_summary(sim_plan.timeline, sim_plan.plan, sim_plan.graph).split())
    assert f"critical path: {next(iter(parts))} " in simulated
    seconds = sim_plan.plan.predicted_seconds
    for share, shown in ((0.02, False), (0.2, True)):
        certificate = replace(sim_plan.plan.certificate, level_objective=seconds, level_bound=(1 - share) * seconds)
        plan = replace(sim_plan.plan, certificate=certificate, search=replace(sim_plan.plan.search, level=2))
        assert bool(left_open(plan, sim_plan.timeline)) == shown
        flat = " ".join(summary(plan, sim_plan.graph, timeline=sim_plan.timeline).split())
        assert ("left open critical path of the step: the host" in flat) == shown
        page = render(replace(sim_plan, plan=plan), ReportExtras())
        assert ("Left open: critical path of the step: the host" in page) == shown


def test_an_event_waits_for_a_stream_for_another_event_or_for_the_host() -> None:
    """By hand: the host until 1, a computation, a collective that waits for it, one that its link holds up."""

    def event(stream: str, start: float, end: float, waits: tuple[int, ...] = (), axis: str = "") -> Event:
        kind, axes = ("all_reduce", (axis,)) if axis else ("", ())
        return Event("e", stream, start, end - start, "forward", 0.0, "", "", None, waits, kind, axes)

    events = (
        event("compute", 1.0, 3.0),
        event("communication tp", 3.0, 4.0, (0,), "tp"),
        event("communication dp", 4.0, 6.0, (0,), "dp"),
        event("compute", 4.0, 5.0, (1,)),
    )
    timeline = replace(built().timeline, events=events, step_seconds=6.0)
    assert critical_seconds(timeline) == {
        "all-reduce over dp": 2.0, "computing": 2.0, "all-reduce over tp": 1.0, HOST: 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("width", quick_at([60, 80, 120], 0))
def test_the_summary_fits_the_terminal(width: int) -> None:
    simulated = built(mlp_graph(12, 64, 128))
    styles = style_plans(simulated.plan, simulated.graph, simulated.hardware)
    lines = summary(simulated.plan, simulated.graph, styles, width, simulated.timeline, simulated.step).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("predicted step") for line in lines) == 1
    assert sum(line.startswith("time breakdown") for line in lines) == 1
    assert sum(line.endswith("predicted step") for line in lines) == 1


def test_code_of_another_version_has_no_lines() -> None:
    """A line that is not the operator's own is not told."""
    simulated = built(mlp_graph(2, 64, 128))
    text = package_files.package_files(simulated)["model_parallel.py"]
    known = operator_lines(simulated.program, text)
    assert known and operator_lines(simulated.program, "") == {}
    shifted = text.replace("    def forward(", "\n    def forward(")
    assert operator_lines(simulated.program, shifted) == {}


def test_runners_up_are_in_words() -> None:
    """No code of a strategy alone is for a reader; one that is no longer offered stays as the plan has it."""
    simulated = built(mlp_graph(4, 64, 128))
    runners_up = [row[7] for block in blocks(simulated.plan, simulated.graph) for row in block["rows"] if row[7]]
    assert runners_up and all(" over " in words or "whole" in words for words in runners_up)
    gone = replace(simulated.plan.ops[0], parts=replace(simulated.plan.ops[0].parts, runner_up="gone gone"))
    plan = replace(simulated.plan, ops=(gone, *simulated.plan.ops[1:]))
    assert blocks(plan, simulated.graph)[0]["rows"][0][7].startswith("gone gone: ")


def test_splits_that_are_not_offered_say_why() -> None:
    shape, mesh = (4, 6, 8, 5), Mesh.parse("dp=1,tp=5")
    graph, op = one_op("aten.scaled_dot_product_attention", [shape] * 3, [shape])
    lines = unavailable_strategies(graph, op, mesh, granularities(graph, mesh))
    assert "batch split over tp: some device would hold nothing: 4 units over 5 devices" in lines
    assert any(line.startswith("dim 2 of x1 split: ") for line in lines)  # keys are needed whole
    assert not any("dp" in line for line in lines)  # an axis of one device splits nothing
    assert any(line.startswith("heads split over tp: ") for line in lines)  # 6 heads leave one of 5 with nothing
    even = Mesh.parse("tp=2")
    assert not any(" over tp" in line for line in unavailable_strategies(graph, op, even, granularities(graph, even)))


def test_memory_without_a_limit_says_so() -> None:
    """A share of an infinite capacity would be 0 %."""
    simulated = built()
    free = replace(simulated.plan, capacity_bytes=math.inf, step=replace(simulated.plan.step, capacity_bytes=0.0))
    memory = next(figure for figure in figures(free, simulated.graph) if figure.label == MEMORY)
    assert (memory.note, memory.about, memory.share) == ("", "no limit was set", None)
