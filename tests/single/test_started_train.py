"""Verification starts train.py as it will run: what float64 and three steps can't see ends with the failing rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.rules import Strategy
from autoshard.search.fixed_styles import random_plan
from autoshard.verification.case import Case, check_files, make_case
from tests.forced import forced_plan
from tests.hangs import HANGS
from tests.slow import quick_at, slow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.a(x).relu(), y)


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Net(), (torch.randn(4, 8), torch.randn(4, 6))


SPEC = f"{__file__}:build"


def made(training: bool = True, split: bool = True) -> tuple[Case, Program, dict[str, str]]:
    graph = capture(SPEC, {}, training=training)

    def allowed(op: object, strategy: Strategy) -> bool:
        return split or {choice.kind for choice in strategy.choices} == {"repeat"}

    plan = forced_plan(graph, Mesh.parse("dp=2"), allowed, 1)
    program = lower(plan, graph)
    return make_case(SPEC, {}, graph), program, dict(emit(program, plan, graph))


FAULTS = {
    "an optimizer of nothing": (
        "    optimizer = make_optimizer(model, weight_decay=options.weight_decay)\n",
        "    optimizer = AdamW([])\n",
    ),
    "a run that ends on one rank": ("    check_run(options, mesh)\n", "    assert mesh.rank != 1, 'planted'\n"),
    "an option that is not there": ("most_left_out(options), lambda", "options.nothing, lambda"),
}


def test_it_is_started_and_said_so() -> None:
    case, program, files = made()
    proof = check_files(case, program, files, own_precision=True)
    assert proof.passed and proof.as_dict()["started"].startswith("run as a user starts it: 3 steps"), proof.failure
    assert "train.py   run as a user starts it: 3 steps on synthetic batches, in fp32, 2 devices" in proof.summary()


@pytest.mark.parametrize("backend", ["lockstep", slow("gloo")])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_train_py_that_dies(fault: str, backend: str) -> None:
    case, program, files = made()
    old, new = FAULTS[fault]
    assert old in files["train.py"]
    faulty = {**files, "train.py": files["train.py"].replace(old, new)}
    if backend == "gloo" and fault != "a run that ends on one rank":
        pytest.skip("processes once")
    proof = check_files(case, program, faulty, backend, timeout_seconds=HANGS, own_precision=True)
    assert not proof.passed and "NOT verified" in proof.summary() and "started" not in proof.summary()
    assert proof.failure.startswith("verification failed: train.py, run as a user starts it: rank "), proof.failure
    if "one rank" in fault:
        assert "rank 1: AssertionError: planted" in proof.failure


def test_a_package_without_a_loss_is_built() -> None:
    case, program, files = made(training=False)
    proof = check_files(case, program, files, own_precision=True)
    assert proof.passed and "the model is built" in proof.summary(), proof.failure


def test_a_plan_that_splits_nothing_says_so() -> None:
    said = "nothing split: every device computes the whole"
    for split in (True, False):
        case, program, files = made(split=split)
        assert any("S" in str(value.layout) for value in program.values) == split
        proof = check_files(case, program, files)
        assert proof.passed and (said in proof.summary()) != split, proof.summary()


class Empties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.none = nn.Linear(8, 6), nn.Parameter(torch.empty(0, 6))
        self.wide = nn.Parameter(torch.empty(4, 0))
        self.register_buffer("seen", torch.zeros(6, 0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = torch.cat((self.a(x).relu(), self.none), 0)
        return (
            F.mse_loss(out, y) + self.seen.sum() + (self.a.weight @ self.seen.new_zeros(8, 0)).sum() + self.wide.sum()
        )


def empties() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Empties(), (torch.randn(4, 8), torch.randn(4, 6))


@pytest.mark.parametrize("seed", quick_at(range(3), 2))
def test_tensors_without_elements_are_initialised(seed: int) -> None:
    graph = capture(f"{__file__}:empties", {})
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2"), load_hardware("cpu-local")), seed)
    program = lower(plan, graph)
    proof = check_files(
        make_case(f"{__file__}:empties", {}, graph), program, emit(program, plan, graph), own_precision=True
    )
    assert proof.passed and proof.started, proof.failure
