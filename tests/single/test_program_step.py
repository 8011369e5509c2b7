"""The whole step of a plan, from the programs of its parts: against the simulated micro-batch, and by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.graph_capture.capture import capture
from autoshard.html_report.picture.plan_picture import plan_svg
from autoshard.html_report.whole_step_view import whole_step
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, Plan
from autoshard.package import package_files
from autoshard.program.lower import lower
from autoshard.replay.simulated_plan import simulate_plan
from autoshard.search.fixed_step import balanced_parts, predicted, with_step
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.simulation import simulate
from autoshard.simulation.memory_curve import plan_memory
from autoshard.simulation.step_timeline import StepCosts, simulate_step
from autoshard.simulation.steps.program_step import step_costs
from autoshard.text.plan_summary import summary
from autoshard.units import format_seconds

GPT2 = Path(__file__).resolve().parents[2] / "examples" / "gpt2.py:build"


@cache
def gpt2() -> Graph:
    sizes = {"batch": 4, "sequence": 256, "n_layer": 4, "n_embd": 512, "n_head": 8, "vocabulary": 1000}
    return capture(str(GPT2), sizes, "bf16-mixed")


@cache
def hardware() -> Hardware:
    return load_hardware("a100-80g-sxm")


@cache
def planned() -> Plan:
    return search(gpt2(), hardware(), SearchRequest(mesh=Mesh((("dp", 2), ("tp", 2)))))


def costs(plan: Plan) -> StepCosts:
    return step_costs(plan, lower(plan, gpt2()), gpt2(), hardware())


@pytest.mark.slow
def test_a_step_of_one_micro_batch_is_the_simulated_one() -> None:
    plan = planned()
    cost = costs(plan)
    program = lower(plan, gpt2())
    timeline = simulate(program, gpt2(), hardware())
    step = simulate_step(cost)
    assert step.step_seconds == pytest.approx(timeline.step_seconds, rel=0.02)  # a bucket's copy delays the backward
    block = hardware().constant("allocator.block")
    for count in (1, 2):
        peak = max(plan_memory(program, gpt2(), accumulates=count > 1, block_bytes=block).bytes)
        several = replace(plan, step=replace(plan.step, micro_batches=count))
        assert simulate_step(costs(several)).peak_bytes[0] == pytest.approx(peak)


def test_micro_batches_repeat_all_but_the_end_of_the_step() -> None:
    plan = planned()
    one = costs(plan)
    step = simulate_step(replace(one, micro_batches=5))
    each = one.parts[0].forward_seconds + one.parts[0].backward_seconds
    assert step.step_seconds == pytest.approx(5 * each + one.stages[0].tail_seconds)
    step_plan = predicted(with_step(plan, gpt2(), StepRequest(global_batch=20)), gpt2())
    assert step_plan.step.micro_batches == 5 and step_plan.step.predicted_seconds == pytest.approx(step.step_seconds)
    said = summary(step_plan, gpt2(), width=100)
    assert f"predicted step     {format_seconds(step.step_seconds)}" in said and "in the mean" not in said


@pytest.mark.slow
def test_what_runs_once_a_step_is_paid_by_all_micro_batches() -> None:
    """The plan of 64 micro-batches is searched for as such: no style's step is shorter, over slow links too."""
    slow, mesh, step = load_hardware("l40s-48g"), Mesh((("dp", 2), ("tp", 2))), StepRequest(micro_batches=64)
    taken = {}
    for strategy in ("best", "dp", "fsdp", "megatron"):
        request = SearchRequest(mesh=mesh, strategy=strategy, step=step)
        plan = predicted(with_step(search(gpt2(), slow, request), gpt2(), step), gpt2())
        taken[strategy] = plan.step.predicted_seconds
        assert plan.step.predicted_seconds == pytest.approx(64 * plan.predicted_seconds)
        assert plan.certificate.level_bound <= plan.predicted_seconds * (1 + 1e-9)
    assert min(taken.values()) == pytest.approx(taken["best"])
    alone = search(gpt2(), slow, SearchRequest(mesh=mesh))
    as_before = predicted(with_step(alone, gpt2(), step), gpt2())
    assert taken["best"] < as_before.step.predicted_seconds * (1 + 1e-9)


def test_the_report_is_of_the_whole_step() -> None:
    plan, graph = planned(), gpt2()
    request = StepRequest(micro_batches=6, stages=2, recompute="full")
    plan = predicted(with_step(plan, graph, request), graph)
    report = package_files.report_text(simulate_plan(plan, graph, hardware()))
    assert f'<span class="value">{format_seconds(plan.step.predicted_seconds)}</span>' in report
    assert f"on each of {plan.step.stages} stages, {2 * plan.mesh.size} devices" in report
    view = whole_step(plan, graph, simulate_plan(plan, graph, hardware()).step)
    assert view is not None
    assert [row[1:3] for row in view["rows"][1:]] == [
        ("the start, transformer.h.0 … transformer.h.1", "all"), ("transformer.h.2 … transformer.h.3, the end", "all"),
    ]  # fmt: skip
    assert view["about"].startswith("6 micro-batches through 2 stages in ")
    drawn = plan_svg(plan, graph, hardware())
    assert all(f">stage {stage}</text>" in drawn for stage in (0, 1)) and "stage 1 has transformer.h.2 …" in drawn
    size = plan.mesh.size
    assert f">ranks {size} to {2 * size - 1}</text>" in drawn
    assert ">stage 0</text>" not in plan_svg(planned(), graph, hardware())
    assert view["picture"].count(">5</text>") == 4  # the last micro-batch, there and back, on both
    assert whole_step(planned(), graph, simulate_plan(planned(), graph, hardware()).step) is None


def test_parts_together_take_what_the_whole_takes_and_hand_on_their_boundary() -> None:
    plan, graph = planned(), gpt2()
    whole = costs(plan).parts[0]
    parts = balanced_parts(plan, graph, 2, 1)
    cut = costs(replace(plan, step=replace(plan.step, micro_batches=4, parts=parts)))
    assert len(cut.parts) == 2 and len(cut.stages) == 2
    forward = sum(part.forward_seconds for part in cut.parts)
    assert forward == pytest.approx(whole.forward_seconds, rel=0.05)
    assert sum(part.backward_seconds for part in cut.parts) == pytest.approx(whole.backward_seconds, rel=0.08)
    assert cut.parts[1].received_bytes == 4 * 256 * 512 * 4  # the residual stream, whole: so small a model is not split
    assert cut.parts[1].receive_seconds > 0 and cut.parts[0].received_bytes == 0
    step = simulate_step(cut)
    assert step.step_seconds < simulate_step(replace(costs(plan), micro_batches=4)).step_seconds


@pytest.mark.parametrize("keep", ["expensive", "input"])
def test_a_block_that_keeps_less_computes_again(keep: str) -> None:
    plan = planned()
    everything = costs(plan).parts[0]
    policies = tuple(BlockPolicy(f"transformer.h.{n}", keep) for n in range(4))
    less = costs(replace(plan, step=replace(plan.step, recompute=policies))).parts[0]
    assert less.saved_bytes < everything.saved_bytes and less.forward_seconds == everything.forward_seconds
    extra = less.backward_seconds - everything.backward_seconds
    assert 0 < extra <= everything.forward_seconds
    if keep == "input":
        assert extra > 0.5 * everything.forward_seconds  # all but the embedding and the head
        assert less.saved_bytes < 0.5 * everything.saved_bytes


def test_a_stage_has_its_output_until_its_backward() -> None:
    """Of layers that keep nothing but inputs, each stage but the last has what it handed on, too."""
    plan = with_step(planned(), gpt2(), StepRequest(micro_batches=4, stages=4, recompute="full"))
    parts = costs(plan).parts
    assert all(part.received_bytes > 0 for part in parts[1:])
    for part, after in itertools.pairwise(parts):
        assert part.saved_bytes >= after.received_bytes
