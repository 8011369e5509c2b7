"""A second axis beside tp, in whole steps that are searched: where it is offered, what it cuts, and what it costs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.errors import InfeasibleError, UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.search.build_plan import Origin
from autoshard.search.search_request import SearchRequest
from autoshard.simulation.step_timeline import simulate_step
from autoshard.step_corrections.shared_sequences import LEAST_TOKENS, shared_sequences
from autoshard.whole_step_search.blocks.block_line import block_line, shortened
from autoshard.whole_step_search.blocks.block_splits import block_splits
from autoshard.whole_step_search.blocks.context_expert_axes import (
    EXPERTS,
    expert_count,
    longest_tokens,
    second_axes,
    shared_experts,
)
from autoshard.whole_step_search.config_space import ConfigSpace, RejectedConfigs, parallel_configs
from autoshard.whole_step_search.front_store import FrontStore, measured_replicas
from autoshard.whole_step_search.joint_plan import joint_plan, step_seconds
from autoshard.whole_step_search.joint_search import joint_search
from autoshard.whole_step_search.solved_steps import JointResult
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_request_space import searched_step
from tests.slow import slow
from tests.stage_brute_force import every_plan

ROOT = Path(__file__).resolve().parents[2]
MIXTRAL = f"{ROOT / 'benchmarks/sized_models.py'}:mixtral"
SMALL = f"{ROOT / 'tests/small_models.py'}:mixtral"


@cache
def hardware() -> Hardware:
    return load_hardware("a100-80g-sxm")


@cache
def experts(sequence: int = 4096) -> Graph:
    return capture(MIXTRAL, {"batch": 2, "sequence": sequence}, "bf16-mixed")


@cache
def small() -> Graph:
    sizes = {"batch": 4, "sequence": 256, "hidden": 256, "inner": 512, "heads": 4, "kv_heads": 4, "vocabulary": 512}
    return capture(SMALL, sizes, "bf16-mixed")


@cache
def long() -> Graph:
    sizes = {"batch": 2, "sequence": 2 * LEAST_TOKENS, "n_layer": 3, "n_embd": 1024, "n_head": 8, "vocabulary": 4000}
    return capture(str(ROOT / "examples" / "gpt2.py:build"), sizes, "bf16-mixed")


def space(graph: Graph, devices: int, batch: int, **fixed: Any) -> ConfigSpace:
    line = block_line(graph)
    return ConfigSpace(devices, batch, len(line.blocks), max(map(len, line.runs())), **fixed)


def made(graph: Graph, devices: int, batch: int, **fixed: Any) -> tuple[JointResult, Plan]:
    configs = space(graph, devices, batch, virtual_stages=(1,), keeps=("all",), **fixed)
    result = joint_search(graph, hardware(), configs, 8e10)
    return result, joint_plan(result, hardware(), Origin("model"))[1]


@pytest.mark.slow
def test_where_a_second_axis_is_offered() -> None:
    assert longest_tokens(long()) == 2 * LEAST_TOKENS and expert_count(long()) == 0
    assert longest_tokens(small()) == 256 and expert_count(small()) == 4
    assert shared_sequences(16, 4 * LEAST_TOKENS) == [1, 2, 4] and shared_sequences(6, 4 * LEAST_TOKENS) == [1, 2]
    assert shared_experts(16, 12) == [1, 2, 4] and shared_experts(2, 8) == [1, 2] and shared_experts(8, 0) == [1]
    said: list[str] = []

    def offered(
        context: Any, expert: Any, tokens: int = 0, count: int = 0, apart: bool = True
    ) -> list[tuple[int, int]]:
        return [*second_axes(8, lambda size: apart, context, expert, (tokens, count), said.append)]

    assert offered(None, None) == [(1, 1)]
    assert offered(None, None, 4 * LEAST_TOKENS, 4) == [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1)]
    assert offered(None, None, 4 * LEAST_TOKENS, 4, apart=False) == [(1, 1)]  # as tp of that size
    assert offered((2,), None, 0, 4) == [(2, 1)] and offered((1,), (1, 2, 3), 0, 4) == [(1, 1), (1, 2)]
    assert offered((2,), (2,)) == []
    assert said == [
        "what stages and tp leave of the devices, 8, is not divided by ep=3",
        "cp=2 and ep=2: only one axis in addition to tp shares a block",
    ]


def test_devices_of_a_step_are_those_of_all_axes() -> None:
    configs = space(small(), 16, 32, context=None, expert=None, experts=4)
    choices = list(parallel_configs(configs, hardware()))
    assert {choice.expert for choice in choices} == {1, 2, 4} and {choice.context for choice in choices} == {1}
    assert len(set(choices)) == len(choices)
    for choice in choices:
        assert choice.stages * choice.replicas * Mesh(choice.inner).size == 16
        assert choice.replicas * choice.micro_batch * choice.micro_batches == 32
        assert choice.expert == 1 or choice.tensor > 1
    assert "dp=2, ep=4, tp=2" in {str(choice).split(", 8 micro")[0] for choice in choices}


@pytest.mark.slow
def test_an_axis_of_experts_cuts_experts_and_one_of_sequences_attention() -> None:
    for graph, axis, target, position, dim in (
        (small(), "ep", EXPERTS, 1, 0),
        (long(), "cp", "aten.scaled_dot_product_attention", 0, 2),
    ):
        short = shortened(block_line(graph))
        for split in block_splits(short.graph, Mesh(((axis, 2), ("tp", 2))), hardware()):
            steps = [step for step in split.program.instructions if getattr(step, "target", "") == target]
            cut = [split.program.value(step.operands[position]).layout.placements[0] for step in steps]  # type: ignore
            assert cut and all(isinstance(placement, Shard) and placement.dim == dim for placement in cut), split.name


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("zero", [slow(0), slow(1), slow(2), 3])
def test_blocks_that_share_sequences_cost_what_their_program_takes(zero: int, stages: int) -> None:
    """Weights are whole along cp, and their gradients sums over it: once a step, or in shards."""
    result, plan = made(
        long(), 8 * stages, 16, micro_batch=(1,), tensor=(2,), context=(2,), zero=(zero,), stages=(stages,)
    )
    assert result.best.problem.mesh == Mesh((("pp", stages), ("dp", 2), ("cp", 2), ("tp", 2)))
    assert any(0 in part.summed for front in result.best.problem.fronts for part in front.costs.held.inner)
    assert step_seconds(plan) == pytest.approx(result.best.seconds, rel=0.04)
    assert plan.step.predicted_peak_bytes <= 1.03 * result.best.peak_bytes
    assert plan.step.predicted_peak_bytes == pytest.approx(result.best.peak_bytes, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_blocks_that_share_experts_cost_what_their_program_takes(zero: int) -> None:
    result, plan = made(experts(), 8, 32, micro_batch=(2,), tensor=(2,), expert=(2,), zero=(zero,), stages=(1,))
    assert step_seconds(plan) == pytest.approx(result.best.seconds, rel=0.04)
    assert plan.step.predicted_peak_bytes == pytest.approx(result.best.peak_bytes, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_what_replicas_move_of_experts_stands_beside_their_products(zero: int) -> None:
    """On one link with tp, whose first collective of a backward comes late: until then nothing waits."""
    result, plan = made(experts(), 8, 32, micro_batch=(2,), tensor=(2,), zero=(zero,), stages=(1,))
    _, backward = result.best.problem.costs[1].free_seconds
    assert backward > 0.2 * result.best.problem.costs[1].backward_seconds
    assert step_seconds(plan) == pytest.approx(result.best.seconds, rel=0.04)


@pytest.mark.slow
def test_gradients_are_summed_once_a_step_and_shards_are_gathered() -> None:
    """Not before they pass the cast of their weight, which would be for every micro-batch; and experts, which ep cuts,
    are cut along another dim between replicas: else devices would exchange them."""
    for zero in (0, 1):
        _, plan = made(small(), 8, 32, micro_batch=(4,), tensor=(2,), expert=(2,), zero=(zero,), stages=(1,))
        weights = {parameter.tensor for parameter in small().parameters} | set(small().weights)
        ways = [step for move in plan.redistributions if move.tensor in weights for step in move.steps]
        assert not [step for step in ways if "exchange" in (step.forward, step.backward)]
        assert not [step for step in ways if "all_to_all" in (step.forward, step.backward)]
        if zero == 0:
            casts = {move.tensor for move in plan.redistributions if move.tensor in small().weights}
            assert not [step for move in plan.redistributions for step in move.steps
                        if move.tensor in casts - {p.tensor for p in small().parameters}
                        and step.backward == "all_reduce"]  # fmt: skip


@pytest.mark.slow
def test_the_best_of_all_meshes_is_found_though_few_are_split() -> None:
    """Every outer choice, with and without a second axis, every cut and every point simulated; what is left out is so
    by its bound."""
    graph = small()
    configs = space(graph, 4, 8, stages=(1, 2), tensor=(1, 2), expert=(1, 2), micro_batch=(1, 2), zero=(0, 1))
    result = joint_search(graph, hardware(), configs, 1e15)
    choices = list(parallel_configs(configs, hardware()))
    line = block_line(graph)
    store, kinds = FrontStore(line, hardware(), replicas=measured_replicas(choices)), tuple(b.kind for b in line.blocks)
    for choice in sorted(choices, key=lambda choice: -choice.micro_batch):
        for split in store.costs(choice.inner, choice.micro_batch) if choice.zero else ():
            store.sharded(split)
    named = {block.kind for block in line.blocks if block.module}
    keeps = tuple(configs.keeps if kind in named else ("all",) for kind in range(max(kinds) + 1))
    steps: dict[int, list[float]] = {1: [], 2: []}
    for choice in choices:
        for split in store.costs(choice.inner, choice.micro_batch):
            sharded = store.sharded(split) if choice.zero else ()
            problem = StepProblem(choice, kinds, split.costs, keeps, hardware(), 1e15, None, sharded)
            for plan in every_plan(problem.stage_problem):
                steps[choice.expert].append(simulate_step(problem.step_costs(plan)).step_seconds)
    assert steps[1] and steps[2]
    best = min(min(each) for each in steps.values())
    assert best * (1 - 1e-9) <= result.best.seconds <= 1.005 * best
    assert result.bound <= best * (1 + 1e-9)
    assert result.considered >= len(choices)


@pytest.mark.slow
def test_meshes_that_can_not_be_better_are_not_split() -> None:
    """The least that their products take is above the best step: two stages leave too few micro-batches."""
    graph = experts()
    configs = space(graph, 8, 2, stages=(1, 2), tensor=(4,), expert=(1, 2), micro_batch=(1,), zero=(0,), keeps=("all",))
    log = RejectedConfigs()
    choices = list(parallel_configs(configs, hardware(), log))
    store = FrontStore(block_line(graph), hardware())
    for choice in choices:
        least = store.least_seconds(choice)
        for split in store.costs(choice.inner, choice.micro_batch):
            kinds = tuple(block.kind for block in store.line.blocks)
            keeps = (("all",),) * (max(kinds) + 1)
            problem = StepProblem(choice, kinds, split.costs, keeps, hardware(), 1e15)
            assert 0 < least <= problem.any_order_least


@pytest.mark.slow
def test_no_part_of_what_is_gathered_is_more_than_all() -> None:
    """Shards that 6 devices do not divide are gathered before their cast, at twice the bytes."""
    sizes = {"batch": 4, "sequence": 2048, "n_layer": 3, "n_embd": 2560, "n_head": 16}
    graph = capture(str(ROOT / "examples" / "gpt2.py:build"), sizes, "bf16-mixed")
    store = FrontStore(block_line(graph), hardware(), replicas=8)
    inner = [
        (costs.alone.held.moved_bytes, sum(part.moved_bytes for part in costs.alone.held.inner))
        for split in store.costs((("tp", 6),), 1)
        for costs in store.sharded(split)
    ]
    assert all(part <= whole for whole, part in inner) and any(part for _, part in inner)


@pytest.mark.slow
def test_what_is_said_of_a_second_axis() -> None:
    def found(graph: Graph, **said: Any) -> JointResult:
        step = StepRequest(global_batch=8, micro_batch=1, stages=1, zero=0, recompute="none", **said)
        return searched_step(graph, hardware(), SearchRequest(devices=4, step=step))

    assert found(small(), expert_parallel=2).best.problem.choice.expert == 2
    assert found(small(), context_parallel="2").best.problem.choice.context == 2
    with pytest.raises(InfeasibleError, match="only one axis in addition to tp shares a block"):
        found(small(), context_parallel=2, expert_parallel=2)
    with pytest.raises(InfeasibleError, match="of the devices, 4, is not divided by ep=3"):
        found(small(), expert_parallel=3)
    with pytest.raises(UsageError, match="--expert-parallel 2: the model has no layer of experts"):
        found(long(), expert_parallel=2)
    with pytest.raises(UsageError, match="--context-parallel 0: expected auto, or numbers from 1 on"):
        found(small(), context_parallel="0")
    plain, every = found(small()), found(small(), expert_parallel="auto")
    message = "ep in addition to tp, for experts: --expert-parallel auto searches it, too"
    assert (message, 1) in plain.undivided and message not in dict(every.undivided)
    assert plain.best.problem.choice.expert == 1 and every.considered > plain.considered
    assert any("cp in addition to tp" in reason for reason, _ in found(long()).undivided)
