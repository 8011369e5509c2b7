"""Results that the forward replaces as a whole: autograd gives what was computed for nothing a gradient of zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture_model
from autoshard.graph_capture.tracing.functionalise import _Functionaliser
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import StepPlan
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from autoshard.verification.case import case_of, check_files
from autoshard.verification.comparison.proof import Proof
from tests.slow import quick_at, slow

WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copied": lambda h, b: h.copy_(b),
    "by a row": lambda h, b: h.copy_(b[:1]),
    "by a view": lambda h, b: h.view(-1).copy_(b.flatten()).view(8, 16),
    "assigned": lambda h, b: h.__setitem__(slice(None), b) or h,
    "zeros": lambda h, b: h.zero_() + b,
    "filled": lambda h, b: h.fill_(0.5) * b,
    "drawn": lambda h, b: h.normal_() + b,
    "kept before": lambda h, b: (h * 1).add(h.copy_(b)),
    "a part": lambda h, b: h[:, :9].copy_(b[:, :9]).sum() + h,
    "the diagonal": lambda h, b: h.fill_diagonal_(0.5) * b,
}


class Overwritten(nn.Module):
    def __init__(self, write: str) -> None:
        super().__init__()
        self.first, self.second, self.head, self.write = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4), write

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = WRITES[self.write](self.first(x), self.second(x))
        return nn.functional.cross_entropy(self.head(h), y)


def proved(write: str, mesh: str) -> Proof:
    """Three steps with weight decay: a gradient of zeros moves a parameter, none does not."""
    torch.manual_seed(0)
    model, inputs = Overwritten(write), (torch.randn(8, 8), torch.randint(0, 4, (8,)))
    graph = capture_model(model, inputs)
    plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), load_hardware("cpu-local")), 1)
    program = lower(plan, graph)
    return check_files(case_of(model, inputs, graph), program, emit(program, plan, graph), backend="lockstep")


@pytest.mark.parametrize("write", quick_at(WRITES, 8))
def test_a_step_is_that_of_the_original(write: str) -> None:
    proof = proved(write, "dp=2,tp=2")
    assert proof.passed, proof.summary()


class Written(nn.Module):
    """Writes into its input, and returns a parameter, which the step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 9)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x.mul_(2).add_(1)
        return {"loss": self.layer(x).square().mean(), "weight": self.layer.weight}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("seed", [1, slow(2)])
def test_what_a_forward_is_given_and_returns_is_that_of_its_time(seed: int, count: int) -> None:
    model, inputs = Written(), (torch.randn(6, 8),)
    graph = capture_model(model, inputs)
    plan = random_plan(PlanningContext(graph, Mesh.parse("tp=3"), load_hardware("cpu-local")), seed)
    plan = replace(plan, step=StepPlan(count))
    program = lower(plan, graph)
    case = case_of(model, inputs, graph, micro_batches=count)
    proof = check_files(case, program, emit(program, plan, graph), own_precision=True)
    assert proof.passed, proof.summary()


def test_nothing_is_computed_for_nothing_where_a_part_is_left_or_nothing_is_trained() -> None:
    inputs = torch.randn(8, 8), torch.randint(0, 4, (8,))
    for write, training, read in (("copied", True, 1), ("a part", True, 0), ("copied", False, 0)):
        ops = capture_model(Overwritten(write), inputs, training=training).ops
        assert sum(op.target == "aten.where" for op in ops) == read
        assert sum(op.target == "aten.linear" for op in ops) == 2 + training


@pytest.mark.parametrize("write", quick_at(["copied", "zeros"], 1))
def test_none_in_place_of_zeros_is_seen(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Functionaliser, "_replacing", lambda self, node, old, value: value)
    proof = proved(write, "dp=2")
    assert not proof.passed and "first" in proof.summary()
