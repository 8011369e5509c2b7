"""What a model says of its step on its own modules, in MindSpore's words, and the errors documented for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest, read_stage_pins
from autoshard.emit import emit
from autoshard.errors import CaptureError, UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture_model
from autoshard.ir.graph import Graph
from autoshard.ir.graph_json import dumps, graph_hash, loads
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import StepPlan
from autoshard.program.lower import lower
from autoshard.search.fixed_step import with_step
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.verification.case import case_of, check_files
from autoshard.whole_step_search.step_request_space import searched_step
from autoshard.workflow import make_plan
from tests.slow import quick_at


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


Ask = Callable[[Tower], object]


def graph_of(ask: Ask) -> Graph:
    return capture_model(tower_of(ask), (torch.randn(6, 8),))


def on_stages(*stages: int | None) -> Ask:
    def ask(tower: Tower) -> None:
        for block, stage in zip(tower.blocks, stages, strict=True):
            if stage is not None:
                block.pipeline_stage = stage  # type: ignore[assignment]

    return ask


def tower_of(ask: Ask) -> Tower:
    tower = Tower()
    ask(tower)
    return tower


@cache
def untouched() -> Graph:
    return graph_of(lambda tower: None)


def step_of(graph: Graph, **said: object) -> StepPlan:
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2"), load_hardware("cpu-local")), 0)
    return with_step(plan, graph, StepRequest(**said)).step  # type: ignore[arg-type]


def begins(step: StepPlan, graph: Graph) -> list[str]:
    return [graph.by_op[part.first_op].module for part in step.parts]


def test_stages_of_modules_cut_the_model_where_they_change() -> None:
    graph = graph_of(on_stages(0, None, None, 1))
    assert graph.module_requests == (("blocks.0", "stage:0"), ("blocks.3", "stage:1"))
    assert graph_hash(graph) != graph_hash(untouched()) and loads(dumps(graph)) == graph
    held = graph_of(on_stages(0, 1, 1, 1))
    step = step_of(held, micro_batches=4)
    assert step.stages == 2 and begins(step, held)[1].startswith("blocks.1")
    pins = read_stage_pins(("stage:blocks.1=0",))
    other = step_of(held, micro_batches=4, stages=2, pins=pins)  # the command line goes before
    assert begins(other, held)[1].startswith("blocks.2")


def test_gradients_of_modules_go_together_by_number() -> None:
    """In the program; the innermost module decides, and what the command line says goes before."""

    def ask(tower: Tower) -> None:
        tower.blocks[0].comm_fusion = tower.blocks[2].comm_fusion = 2  # type: ignore[assignment]
        tower.blocks[1].comm_fusion = 0  # type: ignore[assignment]
        tower.blocks[2].up.comm_fusion = 3  # type: ignore[assignment,union-attr]

    def buckets(graph: Graph, *fuse: str) -> tuple[set[frozenset[str]], list[str]]:
        wanted = SearchRequest(Mesh.parse("dp=2"), strategy="dp", fuse=fuse)
        plan = make_plan(graph, load_hardware("cpu-local"), wanted).plan
        files = emit(lower(plan, graph), plan, graph)
        case = case_of(tower_of(ask), (torch.randn(6, 8),), graph, steps=2)
        assert check_files(case, lower(plan, graph), files).passed
        groups = {frozenset(bucket.parameters) for bucket in lower(plan, graph).gradient_buckets}
        return groups, [note for note in plan.search.notes if "comm_fusion" in note]

    def of(path: str) -> set[str]:
        return {f"{path}.{name}" for name in ("weight", "bias")}

    graph = graph_of(ask)
    assert loads(dumps(graph)) == graph and ("blocks.1", "comm_fusion:0") in graph.module_requests
    alone = {frozenset({name}) for layer in ("up", "down") for name in of(f"blocks.1.{layer}")}
    two = frozenset(of("blocks.0.up") | of("blocks.0.down") | of("blocks.2.down"))
    others = frozenset(of("blocks.3.up") | of("blocks.3.down"))
    assert buckets(graph) == ({*alone, two, frozenset(of("blocks.2.up")), others}, [])
    whole, notes = buckets(graph, "all_reduce=1 GiB")
    assert len(whole) == 1 and "--fuse all_reduce goes before" in notes[0]
    with pytest.raises(CaptureError, match=r"comm_fusion of blocks\.1 is -1, expected an int from 0 on"):
        graph_of(lambda tower: setattr(tower.blocks[1], "comm_fusion", -1))


def test_the_number_of_micro_batches_is_the_models_where_nothing_is_said() -> None:
    graph = graph_of(lambda tower: setattr(tower, "micro_size", 5))
    assert step_of(graph).micro_batches == 5 and step_of(graph, micro_batches=2).micro_batches == 2
    assert step_of(graph, global_batch=18).micro_batches == 3


def test_all_modules_on_the_first_of_one_stage_are_no_pipeline() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        layer.pipeline_stage = 0
    options = {"targets": torch.randn(4, 8), "loss": nn.functional.mse_loss, "hardware": "cpu-local", "mesh": "dp=2"}
    assert autoshard.plan(model, torch.randn(4, 8), **options, micro_batches=2).plan.step.stages == 1


def test_devices_are_those_of_all_stages() -> None:
    """Without a mesh, a search lays out the devices of one stage."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    options = {"targets": torch.randn(12, 8), "loss": nn.functional.mse_loss, "hardware": "a100-80g-sxm"}
    plan = autoshard.plan(model, torch.randn(12, 8), **options, devices=6, stages=3, micro_batches=3).plan
    assert (plan.mesh.size, plan.step.stages, plan.devices) == (2, 3, 6)
    with pytest.raises(UsageError, match="8 devices are not equally many for each of 3 stages") as raised:
        autoshard.plan(model, torch.randn(12, 8), **options, devices=8, stages=3, micro_batches=3)
    assert raised.value.hint == "--stages 2, or --devices 9"


def test_blocks_are_computed_again() -> None:
    one = graph_of(lambda tower: autoshard.recompute(tower.blocks[2], mp_comm_recompute=False))
    assert [(policy.module, policy.keep) for policy in step_of(one).recompute] == [("blocks.2", "communicated")]
    assert one.assumed == untouched().assumed and loads(dumps(one)) == one
    plain = graph_of(lambda tower: autoshard.recompute(tower.blocks[2], parallel_optimizer_comm_recompute=False))
    assert [(policy.module, policy.keep) for policy in step_of(plain).recompute] == [("blocks.2", "input")]
    assert plain.assumed[-1].startswith("weights of blocks.2, which is recomputed, are gathered again, whatever ")
    assert step_of(one, recompute="none").recompute == ()
    both = graph_of(lambda tower: (autoshard.recompute(tower.blocks), autoshard.recompute(tower.blocks[0])))
    assert both.module_requests == (("blocks", "recompute"),)  # what holds it goes before
    assert [policy.module for policy in step_of(both).recompute] == [f"blocks.{n}" for n in range(4)]


def test_a_module_inside_a_block_is_computed_again_alone() -> None:
    """One operator, and one in a loop of equal blocks; a search of whole steps takes blocks only."""

    def ask(tower: Tower) -> None:
        autoshard.recompute(tower.blocks[1].up)
        autoshard.recompute(tower.blocks[3].down)

    graph = graph_of(ask)
    plan = make_plan(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("tp=2"))).plan
    assert plan.step.keeps == {"blocks.1.up": "input", "blocks.3.down": "input"}
    files = emit(lower(plan, graph), plan, graph)
    assert files["model_parallel.py"].count("recomputed(self.up, ") == 1
    assert files["model_parallel.py"].count("recomputed(self.down, ") == 1
    case = case_of(tower_of(ask), (torch.randn(6, 8),), graph, steps=2)
    assert check_files(case, lower(plan, graph), files).passed
    wanted = SearchRequest(devices=2, step=StepRequest(global_batch=12))
    with pytest.raises(UsageError, match="a search of whole steps computes items of lists of modules again, whole"):
        searched_step(graph, load_hardware("cpu-local"), wanted)


def test_the_command_follows_them_without_a_word_of_its_own() -> None:
    """The search, too, is of a step of as many micro-batches."""

    def ask(tower: Tower) -> None:
        on_stages(0, 0, 1, 1)(tower)
        tower.micro_size = 6  # type: ignore[assignment]
        autoshard.recompute(tower.blocks[1])

    graph, hardware = graph_of(ask), load_hardware("cpu-local")
    for strategy in ("best", "random:1"):
        plan = make_plan(graph, hardware, SearchRequest(mesh=Mesh.parse("dp=2"), strategy=strategy)).plan
        assert (plan.step.stages, plan.step.micro_batches) == (2, 6) and plan.step.predicted_seconds > 0
        assert plan.step.keeps == {"blocks.1": "input"}
    alone = make_plan(untouched(), hardware, SearchRequest(mesh=Mesh.parse("dp=2"))).plan
    assert (
        alone.predicted_seconds
        > make_plan(graph, hardware, SearchRequest(mesh=Mesh.parse("dp=2"))).plan.predicted_seconds
    )


@pytest.mark.parametrize(
    ("ask", "said", "words"),
    quick_at(
        [
            (on_stages(0, 1, 0, 1), {"micro_batches": 4}, "blocks.1.* is on stage 1, and blocks.2.* on stage 0"),
            (on_stages(0, 0, 2, 2), {"micro_batches": 4}, "stages? .*(not used|each must be used)"),
            (on_stages(0, 0, 1, 1), {"micro_batches": 1}, "1 micro-batch for 2 stages"),
            (on_stages(0, 0, 1, 1), {}, "needs micro-batches to keep them busy"),
            (
                lambda tower: setattr(tower, "unused", autoshard.recompute(nn.Identity())),
                {},
                "recompute\\(\\) of unused: it makes no operator",
            ),
        ],
        1,
        3,
        4,
    ),
)
def test_what_can_not_be_is_said(ask: Ask, said: dict[str, object], words: str) -> None:
    graph = graph_of(ask)
    with pytest.raises(UsageError, match=words):
        step_of(graph, **said)


def test_values_that_can_not_be() -> None:
    with pytest.raises(CaptureError, match=r"pipeline_stage of blocks\.0 is -1, expected an int from 0 on"):
        graph_of(on_stages(-1, 0, 0, 0))
    with pytest.raises(UsageError, match="for the second time"):
        graph_of(lambda tower: autoshard.recompute(autoshard.recompute(tower.blocks[0])))


def test_a_searched_step_keeps_to_them() -> None:
    def ask(tower: Tower) -> None:
        on_stages(0, 0, 0, 1)(tower)
        autoshard.recompute(tower)

    graph, hardware = graph_of(ask), load_hardware("a100-80g-sxm")
    wanted = SearchRequest(devices=2, step=StepRequest(global_batch=12, micro_batch=3))
    best = searched_step(graph, hardware, wanted).best
    assert best.problem.choice.stages == 2
    assert [(part.first, part.stop) for part in best.plan.parts] == [(0, 3), (3, len(best.problem.kinds))]
    inside = [best.problem.keeps[kind][point] for kind, point in zip(best.problem.kinds, best.plan.points, strict=True)]
    assert inside[:4] == ["input"] * 4
    free = replace(wanted, step=replace(wanted.step, recompute="none"))
    assert searched_step(graph, hardware, free).best.problem.keeps[0] == ("all",)
