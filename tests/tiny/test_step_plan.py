"""How a step is made of micro-batches, stages and what is computed again: as data, as options, and what can't be."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster.hardware import hardware_text, load_hardware
from autoshard.constraints.step_request import StagePin, StepRequest, read_stage_pins
from autoshard.errors import InfeasibleError, UsageError
from autoshard.ir import plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.plan import BlockPolicy, OpPlan, Plan, StagePart, StepPlan
from autoshard.program.step_check import check_one_batch, check_step, micro_batches_of
from autoshard.search.fixed_step import balanced_parts, with_step
from autoshard.search.memory_fit import fitting_step
from autoshard.solvers.common.effort import ROUNDS
from tests.graphs import mlp_graph
from tests.tiny.test_plan_io import a_plan

# --- the whole step in a plan ---


PARTS = (StagePart(0, 0, "linear_0"), StagePart(1, 0, "linear_2"))


def planned(graph: Graph, seconds: dict[str, float] | None = None) -> Plan:
    """A plan of the graph whose operators take a second each, or as `seconds` says."""
    ops = tuple(OpPlan(op.name, "=", "", (seconds or {}).get(op.name, 1.0), 0.0) for op in graph.ops)
    return dataclasses.replace(a_plan(), ops=ops, hardware_text=load_hardware("cpu-local").text)


def test_a_plan_keeps_its_step() -> None:
    step = StepPlan(8, "interleaved", 2, PARTS, (BlockPolicy("h.0", "input"),))
    plan = dataclasses.replace(a_plan(), step=step)
    assert plan_json.loads(plan_json.dumps(plan)) == plan
    assert (plan.step.stages, plan.devices, a_plan().devices) == (2, 2 * plan.mesh.size, plan.mesh.size)


def test_a_plan_from_before_whole_steps_is_one_micro_batch() -> None:
    data = json.loads(plan_json.dumps(a_plan()))
    del data["step"]
    data["schema_version"] = 3
    assert plan_json.loads(json.dumps(data)) == a_plan()


WRONG = [
    (StepPlan(2, parts=(PARTS[0], dataclasses.replace(PARTS[1], stage=2))), "stage 1 is not used"),
    (StepPlan(2, parts=(StagePart(1, 0, "linear_0"), StagePart(0, 0, "linear_2"))), "stages may not decrease"),
    (StepPlan(1, parts=PARTS), "1 micro-batch for 2 stages"),
    (StepPlan(2, parts=(PARTS[0], StagePart(1, 0, "linear_9"))), "begins with linear_9, which the model has not"),
    (StepPlan(2, parts=(PARTS[0], StagePart(1, 0, "linear_0"))), "before part 0"),
    (StepPlan(2, parts=(StagePart(0, 0, "relu_0"), PARTS[1])), "the first part begins with relu_0"),
    (StepPlan(3, "interleaved", 1, PARTS), "groups of 2"),
    (StepPlan(4, "1f1b", 2, PARTS), "need the interleaved schedule"),
    (StepPlan(4, "interleaved", 2, PARTS), "2 parts for 2 stages of 2"),
    (StepPlan(2, recompute=(BlockPolicy("h.7", "input"),)), "no module h.7"),
    (StepPlan(2, recompute=(BlockPolicy("h.1", "most"),)), "keeps 'most'"),
    (StepPlan(2, "zb"), "unknown schedule 'zb'"),
]


@pytest.mark.parametrize(("step", "says"), WRONG, ids=[says for _, says in WRONG])
def test_what_can_not_be_is_said(step: StepPlan, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_step(step, mlp_graph())
    check_step(StepPlan(2, parts=PARTS, recompute=(BlockPolicy("h.1", "input"),)), mlp_graph())


def test_a_batch_that_does_not_divide_says_what_would() -> None:
    graph = mlp_graph(batch=8)
    assert micro_batches_of(graph, 32) == 4
    with pytest.raises(UsageError, match="captured with 8 samples") as raised:
        micro_batches_of(graph, 30)
    assert raised.value.hint == "--global-batch 24 or 32, or a model captured with 6 samples"
    with pytest.raises(UsageError) as raised:
        micro_batches_of(graph, 4)
    assert raised.value.hint.startswith("--global-batch 8")


REFUSED = [
    (StepRequest(micro_batches=2, global_batch=16), "both say"),
    (StepRequest(schedule="1f1b"), "--schedule is about stages"),
    (StepRequest(virtual_stages=2), "--virtual-stages is about stages"),
    (StepRequest(stages=2, virtual_stages=2, schedule="gpipe"), "a stage has one part"),
    (StepRequest(stages=2, pins=(StagePin("h.0", 2),)), "there are stages 0 to 1"),
    (StepRequest(recompute="some"), "unknown recomputation"),
]


@pytest.mark.parametrize(("request_", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_options_that_contradict_each_other(request_: StepRequest, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        request_.check()


def test_what_knows_one_micro_batch_says_so() -> None:
    check_one_batch(StepPlan(recompute=(BlockPolicy("h.0", "input"),)), "x")
    for step, says in ((StepPlan(3), "this plan's has 3"), (StepPlan(2, parts=PARTS), "has 2 on 2 stages")):
        with pytest.raises(UsageError, match=says):
            check_one_batch(step, "--export profiler")
    placed = StepPlan(parts=(StagePart(0, 0, "a", ("a",)), StagePart(1, 0, "b", ("b",))))
    with pytest.raises(UsageError, match="with --place none"):
        check_one_batch(placed, "--export profiler")


def test_stage_pins_are_read() -> None:
    assert read_stage_pins(("fc=n@tp", "stage:h.0-2=0", "stage:head=1")) == (
        *(StagePin(f"h.{n}", 0) for n in range(3)),
        StagePin("head", 1),
    )
    for text in ("stage:h.0", "stage:h.0=x", "stage:=1", "stage:h.4-2=0"):
        with pytest.raises(UsageError, match="pin"):
            read_stage_pins((text,))


def test_stages_are_cut_between_blocks_and_balanced() -> None:
    graph = mlp_graph(layers=6)
    assert [part.first_op for part in balanced_parts(planned(graph), graph, 2, 1)] == ["linear_0", "linear_3"]
    heavy = planned(graph, {"linear_0": 20.0})
    assert [part.first_op for part in balanced_parts(heavy, graph, 2, 1)] == ["linear_0", "linear_1"]
    four = balanced_parts(planned(graph), graph, 2, 2)
    assert [(part.stage, part.chunk) for part in four] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    step = with_step(planned(graph), graph, StepRequest(global_batch=32, stages=2, recompute="full")).step
    assert step.micro_batches == 4 and step.recompute == tuple(BlockPolicy(f"h.{n}", "input") for n in range(6))


@given(st.lists(st.floats(0.1, 9.0), min_size=7, max_size=7), st.integers(2, 4), st.randoms(use_true_random=False))
def test_no_cut_between_blocks_is_better(seconds: list[float], stages: int, source: random.Random) -> None:
    graph = mlp_graph(layers=7)
    plan = planned(graph, {f"linear_{n}": cost for n, cost in enumerate(seconds)})

    def longest(starts: list[int]) -> float:
        ends = [*starts[1:], len(plan.ops)]
        return max(sum(op.forward_seconds for op in plan.ops[a:b]) for a, b in zip(starts, ends, strict=True))

    names = [op.name for op in graph.ops]
    balanced = longest([names.index(part.first_op) for part in balanced_parts(plan, graph, stages, 1)])
    other = sorted(source.sample(range(1, 7), stages - 1))
    assert balanced <= longest([0, *(2 * block for block in other)]) + 1e-9


def test_pins_of_stages_are_kept_or_refused() -> None:
    graph = mlp_graph(layers=6)
    parts = balanced_parts(planned(graph), graph, 2, 1, read_stage_pins(("stage:h.0-4=0",)))
    assert parts[1].first_op in ("linear_5", "relu_5", "loss")
    for pins in (("stage:h.0=1", "stage:h.5=0"), ("stage:h.0=0", "stage:h.0.fc=1"), ("stage:none=0",)):
        with pytest.raises(UsageError):
            balanced_parts(planned(graph), graph, 2, 1, read_stage_pins(pins))


# --- the memory limit of a whole step: the search's own limit follows what the step of its plan needs ---


GIB = 2.0**30


def micro_batch(size: float) -> Plan:
    """Plans of 10 GiB and below, the faster the larger; none below 2 GiB."""
    size = min(size, 10 * GIB)
    if size < 2 * GIB:
        raise InfeasibleError("too small")
    text = hardware_text(load_hardware("a100-80g-sxm"))
    return replace(a_plan(), hardware_text=text, predicted_peak_bytes=size, predicted_seconds=20.0 - size / GIB)


def halved(plan: Plan) -> Plan:
    """On two stages each has half of the memory, and 1 GiB beside it."""
    size = plan.predicted_peak_bytes / 2 + GIB
    return replace(plan, step=StepPlan(8, predicted_seconds=8 * plan.predicted_seconds, predicted_peak_bytes=size))


@pytest.mark.parametrize("limit", [6.5, 5.0, 4.0, 3.0])
def test_what_fits_on_its_stage_is_kept(limit):
    tried: list[float] = []

    def searched(size: float) -> Plan:
        tried.append(size)
        return micro_batch(size)

    plan = fitting_step(searched, halved, limit * GIB, math.inf)
    assert plan.step.predicted_peak_bytes <= limit * GIB and plan.capacity_bytes == limit * GIB
    assert plan.step.predicted_peak_bytes >= 0.9 * min(6.0, limit) * GIB  # not half empty
    assert len(tried) <= ROUNDS and tried[0] == math.inf
    assert bool(plan.search.notes) == (limit < 6)


def test_what_fits_nowhere_says_how_much_it_needs():
    with pytest.raises(
        InfeasibleError, match=r"no plan was found whose step fits in 1\.5 GiB a device: the smallest"
    ) as e:
        fitting_step(micro_batch, halved, 1.5 * GIB, math.inf)
    assert not e.value.proven


def test_a_model_without_a_plan_says_so_itself():
    with pytest.raises(InfeasibleError, match="too small"):
        fitting_step(micro_batch, halved, GIB, GIB)
