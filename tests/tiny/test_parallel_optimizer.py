"""MindSpore's parallel optimizer: its words for stages of ZeRO, what they refuse, and which weights it leaves whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.errors import UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.layout import Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, StepPlan
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.whole_step_search.optimizer_shards import ZeroRequest, least_step, with_shards
from autoshard.workflow import make_plan
from tests.graphs import mlp_graph


def test_its_words() -> None:
    assert StepRequest(enable_parallel_optimizer=True).zero_levels == (1,)
    assert StepRequest(enable_parallel_optimizer=True, gradient_accumulation_shard=True).zero_levels == (2,)
    assert StepRequest(enable_parallel_optimizer=True).threshold_bytes == 64 * 1024
    assert StepRequest(zero="2,1").zero_levels == (2, 1) and StepRequest(zero="auto").zero_levels == (0, 1, 2, 3)
    assert StepRequest(zero=1).threshold_bytes == 0


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"gradient_accumulation_shard": True}, "is about the parallel optimizer"),
        ({"parallel_optimizer_threshold": 8}, "is about the parallel optimizer"),
        ({"enable_parallel_optimizer": True, "zero": 3}, "both say"),
        ({"enable_parallel_optimizer": True, "parallel_optimizer_threshold": -1}, "whole number of KB"),
        ({"zero": "4"}, "expected auto"),
        ({"zero": "1,x"}, "expected auto"),
    ],
)
def test_what_it_refuses(said: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        StepRequest(**said).check()  # type: ignore[arg-type]


def cut(plan: Plan) -> dict[str, set[int]]:
    """Parameter -> the axes that cut it."""
    return {
        p.path: {axis for axis, placement in enumerate(p.layout.placements) if isinstance(placement, Shard)}
        for p in plan.parameters
    }


def test_a_threshold_leaves_small_weights_whole() -> None:
    """Sizes are of the whole parameter; what does not exceed the threshold stays, and operators stay as they were."""
    graph, hardware = mlp_graph(), load_hardware("a100-80g-sxm")
    plan = random_plan(
        PlanningContext(graph, Mesh.parse("dp=2"), hardware), 3, allowed=lambda op, s: "S0" in str(s.results[0])
    )
    plan = replace(plan, step=StepPlan(4))
    size = {p.path: 4 * graph.tensor(p.tensor).numel for p in graph.parameters}
    limit = sorted(size.values())[1]
    assert {size[path] > limit for path in size} == {True, False}
    small = with_shards(plan, graph, hardware, ZeroRequest(1, limit))
    assert cut(small) == {path: {0} if size[path] > limit else set() for path in size}
    assert all(axes == {0} for axes in cut(with_shards(plan, graph, hardware, ZeroRequest(2))).values())
    assert not any(cut(with_shards(small, graph, hardware, ZeroRequest(0))).values())
    assert [op.strategy for op in small.ops] == [op.strategy for op in plan.ops] and small.step.zero == 1


def test_level_1_of_a_step_is_the_leaner_of_two() -> None:
    """What holds least in a micro-batch need not do so in a step that adds up gradients."""
    graph, hardware = mlp_graph(), load_hardware("a100-80g-sxm")
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2"), hardware), 3)
    least, fastest = (
        replace(plan, step=StepPlan(4, predicted_seconds=seconds, predicted_peak_bytes=size))
        for seconds, size in ((4.0, 163.8), (2.0, 163.4))
    )
    leaner = least_step(least, fastest)
    assert leaner.step == fastest.step and leaner.search.level == 1 and leaner.certificate.level_bound == 0
    assert least_step(fastest, least) == fastest


def test_level_1_of_the_command_needs_no_more_than_level_2() -> None:
    graph, hardware = mlp_graph(), load_hardware("a100-80g-sxm")
    step = StepRequest(micro_batches=4, zero="auto")
    wanted = SearchRequest(mesh=Mesh.parse("dp=2"), step=step)
    fast, lean = (make_plan(graph, hardware, replace(wanted, level=level)).plan for level in (2, 1))
    assert lean.step.predicted_peak_bytes <= fast.step.predicted_peak_bytes
    assert fast.step.predicted_seconds <= lean.step.predicted_seconds
