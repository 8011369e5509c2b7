"""What can be computed again of models whose blocks are lists of modules, or are called several times."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.search.build_plan import Origin
from autoshard.search.fixed_step import NO_CALL, with_step
from autoshard.search.search_request import SearchRequest
from autoshard.verification.case import check_files, make_case
from autoshard.whole_step_search.joint_plan import joint_plan
from autoshard.whole_step_search.step_request_space import searched_step
from tests.forced import forced_plan
from tests.slow import quick_at


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        output = self.down(self.up(self.norm(x)).tanh())
        return output if scale is None else output * scale


class Pairs(nn.Module):
    """A list of lists, as many write attention and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Half(), Half()]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.layers:  # type: ignore[misc]
            x = first(x) + x
            x = second(x) + x
        return x.square().mean()


class Named(nn.Module):
    """The modules of a block are called one by one, a single operator each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["up"](layer["norm"](x)).tanh()  # type: ignore[index]
        return x.square().mean()


class Turns(nn.Module):
    """Two blocks in turns; the second time with one operator more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Half() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for turn in range(2):
            for layer in self.layers:
                x = x + layer(x, x.mean(-1, keepdim=True) if turn else None)
        return x.square().mean()


def build(kind: str = "Pairs") -> tuple[nn.Module, tuple[Tensor, ...]]:
    return {"Pairs": Pairs, "Named": Named, "Turns": Turns}[kind](), (torch.randn(4, 3, 8),)


SPEC = f"{__file__}:build"
HALVES = ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
OFTEN = "it is called several times, by other code each time"


def again(plan: Plan) -> list[str]:
    return [policy.module for policy in plan.step.recompute]


@pytest.mark.parametrize(
    ("kind", "wanted", "reason"), quick_at([("Pairs", HALVES, ""), ("Named", [], NO_CALL), ("Turns", [], OFTEN)], 2)
)
def test_what_nothing_calls_is_left_out_and_what_it_holds_is_computed_again(
    kind: str, wanted: list[str], reason: str
) -> None:
    graph = capture(SPEC, {"kind": kind})
    plan = forced_plan(graph, Mesh.parse("tp=2"), lambda *_: True)
    step_plan = with_step(plan, graph, StepRequest(micro_batches=2, recompute="full"))
    left = [f"layers.{n} is not recomputed: {reason}" for n in range(2) if reason]
    assert again(step_plan) == wanted and [*step_plan.search.notes[len(plan.search.notes) :]] == left
    program = lower(step_plan, graph)
    files = emit(program, step_plan, graph)
    assert ("recomputed(" in files["model_parallel.py"]) == bool(wanted)
    case = make_case(SPEC, {"kind": kind}, graph, steps=1, micro_batches=2)
    proof = check_files(case, program, files)
    assert proof.passed, proof.failure


def searched(graph: Graph) -> tuple[Graph, Plan, float]:
    """The plan that a search makes, and the seconds of its blocks."""
    step = StepRequest(global_batch=16, stages=2, micro_batch=2, recompute="full")
    hardware = load_hardware("a100-80g-sxm")
    result = searched_step(graph, hardware, SearchRequest(devices=2, step=step))
    return *joint_plan(result, hardware, Origin("")), result.best.seconds


def test_a_searched_step_computes_no_block_again_twice() -> None:
    """Between the halves of a block stands what is of none, so it comes twice in the line of blocks."""
    graph, plan, seconds = searched(capture(SPEC, {"kind": "Pairs"}))
    assert again(plan) == HALVES
    assert plan.step.predicted_seconds < 1.15 * seconds
    assert "recomputed(" in "".join(emit(lower(plan, graph), plan, graph).values())


def test_a_searched_step_keeps_what_can_not_be_called() -> None:
    _, plan, _ = searched(capture(SPEC, {"kind": "Named"}))
    assert again(plan) == []


def test_a_module_that_comes_several_times_is_named_once() -> None:
    """Each time on another stage, where its code is one."""
    graph, plan, _ = searched(capture(SPEC, {"kind": "Turns"}))
    assert again(plan) == ["layers.0", "layers.1"]
    assert "recomputed(" in "".join(emit(lower(plan, graph), plan, graph).values())
