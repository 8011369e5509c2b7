"""Packages with stages: processes of gloo against the original model, and what a run of one leaves behind."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.load_model import load_model
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, StagePart
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.program.stage_programs import handed_from, stage_programs
from autoshard.search.fixed_step import with_step
from autoshard.search.fixed_styles import random_plan
from autoshard.simulation.steps.program_step import step_costs
from autoshard.verification.case import Case, check_files, make_case
from autoshard.verification.comparison.proof import Proof
from autoshard.verification.training_precision import TrainingPrecisionStep
from tests import launched
from tests.forced import sharded_plan
from tests.hangs import HANGS
from tests.slow import slow

COUNT = 4


def build(dropout: float = 0.1, layers: int = 3) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=16, n_head=2, n_positions=8, vocab_size=40, use_cache=False,
                        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)  # fmt: skip
    ids = torch.randint(0, 40, (4, 8))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


SPEC = f"{__file__}:build"


@cache
def captured() -> Graph:
    return capture(SPEC, {})


@cache
def case() -> Case:
    return make_case(SPEC, {}, captured(), steps=2, micro_batches=COUNT)


def planned(mesh: str, seed: int, cut: int | None = None, graph: Graph | None = None, **step: object) -> Plan:
    """A random plan in stages; `cut`: anywhere, drawn, not between blocks."""
    graph = graph or captured()
    plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), load_hardware("cpu-local")), seed)
    request = StepRequest(**({"micro_batches": COUNT, "stages": 2} | step))  # type: ignore[arg-type]
    plan = with_step(plan, graph, request)
    if cut is None:
        return plan
    count = len(plan.step.parts)
    starts = [0, *sorted(random.Random(cut).sample(range(1, len(graph.ops)), count - 1))]
    stages = plan.step.stages
    parts = tuple(StagePart(i % stages, i // stages, graph.ops[s].name) for i, s in enumerate(starts))
    return replace(plan, step=replace(plan.step, parts=parts))


def checked(plan: Plan, fault: tuple[str, str, str] | None = None) -> Proof:
    """`fault`: (file, what stands there, what is to stand there)."""
    program = lower(plan, captured())
    files = dict(emit(program, plan, captured()))
    if fault is not None:
        name, old, new = fault
        assert old in files[name]
        files[name] = files[name].replace(old, new)
    proof = check_files(case(), program, files, "gloo", 240.0)
    assert proof.ranks == plan.devices
    return proof


def check(plan: Plan) -> None:
    proof = checked(plan)
    assert proof.passed, proof.failure


def test_two_stages_of_two_devices() -> None:
    """A random plan, cut anywhere: the tied embedding is on both, dropout everywhere, all blocks computed again."""
    check(planned("tp=2", 1, cut=1, recompute="full"))


@pytest.mark.slow
def test_two_stages_that_keep_what_collectives_gave() -> None:
    """Dropout, and micro-batches that are on their way through both stages at once."""
    plan = planned("tp=2", 1, recompute="communicated")
    assert any("kept=True" in text for text in emit(lower(plan, captured()), plan, captured()).values())
    check(plan)


def test_two_virtual_stages() -> None:
    check(planned("dp=1", 0, virtual_stages=2))


class LongSkips(nn.Module):
    """What each of the first layers makes is read by one of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(nn.Linear(8, 8) for _ in range(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).tanh()
            skips.append(x)
        for layer in self.up:
            x = layer(x).tanh() * skips.pop()
        return x.square().mean()


def build_skips() -> tuple[nn.Module, tuple[Tensor]]:
    return LongSkips(), (torch.randn(8, 8),)


@pytest.mark.parametrize(
    ("mesh", "step"),
    [("dp=1", {"stages": 4, "schedule": "gpipe"}), ("tp=2", {"stages": 3}), ("dp=2", {"virtual_stages": 2})],
)
def test_values_skip_stages(mesh: str, step: dict[str, object]) -> None:
    """Straight to each stage that reads them, and what that takes is predicted."""
    graph = capture(f"{__file__}:build_skips", {})
    plan = planned(mesh, 1, cut=3, graph=graph, **step)
    program = lower(plan, graph)
    sources = handed_from(stage_programs(program, plan), program)
    assert any(maker < number - 1 for number, received in enumerate(sources) for maker, _ in received)
    costs = step_costs(plan, program, graph, load_hardware("cpu-local"))
    assert all(skip.seconds > 0 and skip.bytes > 0 for skip in costs.skips) and costs.skips
    own_case = make_case(f"{__file__}:build_skips", {}, graph, steps=2, micro_batches=COUNT)
    proof = check_files(own_case, program, emit(program, plan, graph), "lockstep", 120.0)
    assert proof.passed, proof.failure


@pytest.mark.parametrize(
    ("mesh", "step"), [slow("dp=2", {"schedule": "gpipe"}), slow("tp=2", {}), ("dp=1", {"virtual_stages": 2})]
)
def test_stages_in_lockstep_with_a_step_in_their_own_precision(mesh: str, step: dict[str, object]) -> None:
    plan = planned(mesh, 1, cut=2, **step)
    program = lower(plan, captured())
    assert isinstance(case().native_step, TrainingPrecisionStep)
    proof = check_files(case(), program, emit(program, plan, captured()), "lockstep", 120.0, own_precision=True)
    assert proof.passed, proof.failure
    assert not proof.unverified


def test_a_weight_on_two_of_three_stages() -> None:
    """The tied embedding's group is of the first and the last: the middle one has one group less."""
    check(planned("dp=1", 0, stages=3))


class TwoLosses(nn.Module):
    """A second mean over labels of its own, made in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.early, self.up, self.late = nn.Embedding(13, 8), *(nn.Linear(8, n) for n in (5, 8, 7))

    def forward(self, ids: Tensor, coarse: Tensor, fine: Tensor) -> Tensor:
        x = self.words(ids).flatten(0, 1)
        loss = nn.functional.cross_entropy(self.early(x), coarse.flatten())
        return loss + nn.functional.cross_entropy(self.late(self.up(x).tanh()), fine.flatten())


def build_two_losses() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return TwoLosses(), (torch.randint(0, 13, (4, 6)), torch.randint(0, 5, (4, 6)), torch.randint(0, 7, (4, 6)))


def test_labels_count_on_every_stage() -> None:
    spec = f"{__file__}:build_two_losses"
    graph = capture(spec, {})
    first = next(op.name for op in graph.ops if op.module == "up")
    plan = planned("dp=1", 0, graph=graph)
    parts = (StagePart(0, 0, graph.ops[0].name), StagePart(1, 0, first))
    plan = replace(plan, step=replace(plan.step, parts=parts))
    program = lower(plan, graph)
    assert [len(part.label_counts) for part in stage_programs(program, plan)] == [1, 1]
    case = make_case(spec, {}, graph, steps=2, micro_batches=COUNT)
    proof = check_files(case, program, emit(program, plan, graph), "gloo", 240.0)
    assert proof.passed, proof.failure


@pytest.mark.parametrize("name", ["auxiliary", "the same twice"])
def test_a_loss_within_an_expression_counts_on_its_stage(name: str) -> None:
    spec = f"{Path(__file__).parents[1] / 'label_models.py'}:build"
    graph = capture(spec, {"name": name})
    plan = planned("tp=1", 0, graph=graph, micro_batches=2)
    program = lower(plan, graph)
    files = emit(program, plan, graph)
    assert any("counted(F" in line and ") * " in line for line in files["part_1.py"].splitlines())  # it is nested
    proof = check_files(make_case(spec, {"name": name}, graph, steps=1, micro_batches=2), program, files, "gloo", 240.0)
    assert proof.passed, proof.failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "cut", "step"),
    [
        ("dp=1", 3, {"stages": 4}),
        ("dp=2,tp=2", None, {}),
        ("tp=2", 5, {"schedule": "gpipe"}),
        ("dp=2", 7, {"virtual_stages": 2, "recompute": "selective"}),
        ("tp=2", None, {"recompute": "selective"}),
        ("dp=2", 8, {}),
        ("tp=2", 9, {}),
    ],
)
def test_more_stages_and_cuts(mesh: str, cut: int | None, step: dict[str, object]) -> None:
    check(planned(mesh, 2, cut, **step))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero", "virtual"), [("dp=2", 1, 2), ("dp=2", 2, 1), ("dp=2,tp=2", 1, 1)])
def test_weights_in_shards_are_gathered_before_a_stage_has_its_input(mesh: str, zero: int, virtual: int) -> None:
    plan = sharded_plan(captured(), Mesh.parse(mesh), "dp")
    request = StepRequest(micro_batches=COUNT, stages=2, virtual_stages=virtual, zero=zero)
    plan = with_step(plan, captured(), request)
    plan = replace(plan, step=replace(plan.step, zero=zero))
    parts = stage_programs(lower(plan, captured()), plan)
    assert all(any(bucket.once for bucket in part.weight_buckets) for part in parts)
    check(plan)


FAULTS = {
    # An in-place c10d collective in an autograd Function: gradients are wrong, and nothing else tells
    "collectives are kept": (
        "runtime/recompute.py",
        "return op in KEPT\n",
        'return op in KEPT or op.namespace == "c10d"\n',
    ),
    "numbers of another micro-batch": ("runtime/recompute.py", "with _at(random, moment), results:", "with results:"),
    "a tied weight by itself": ("train.py", "mesh.stages.sum_shared(parameters, SHARED)", "pass"),
    "a tied weight counts twice": ("train.py", "max_norm, SHARED)", "max_norm)"),
    "gradients of the sum": ("runtime/places.py", "output[0] / len(self.micro_batches)", "output[0]"),
}


def test_every_fault_can_be_planted() -> None:
    """Those that are run seldom, too."""
    plan = planned("dp=1", 1, recompute="full")
    files = emit(lower(plan, captured()), plan, captured())
    assert [name for name, (file, old, _) in FAULTS.items() if old not in files[file]] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    selective = fault == "collectives are kept"
    step = {"stages": 1, "recompute": "selective"} if selective else {"recompute": "full"}
    proof = checked(planned("tp=2" if selective else "dp=1", 1, **step), FAULTS[fault])
    assert not proof.passed


def torchrun(package: Path, processes: int, *options: object) -> dict[int, float]:
    """The losses by step."""
    done = launched.torchrun(package / "train.py", processes, "--backend", "gloo", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)}


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_stages_and_weights_come_out(tmp_path: Path) -> None:
    """Two stages of one device, then one of two, then out to the original: as one run on one device does it."""
    quiet = capture(SPEC, {"dropout": 0.0})
    for name, plan in {
        "stages": planned("dp=1", 0, graph=quiet),
        "one": planned("dp=1", 0, graph=quiet, stages=1),
        "wide": planned("tp=2", 1, graph=quiet, stages=1),
    }.items():
        write_package(tmp_path / name, emit(lower(plan, quiet), plan, quiet))
    expected = torchrun(tmp_path / "one", 1, "--steps", 3, "--save", tmp_path / "alone")
    first = torchrun(tmp_path / "stages", 2, "--steps", 2, "--save", tmp_path / "saved")
    later = torchrun(tmp_path / "wide", 2, "--steps", 3, "--resume", tmp_path / "saved", "--save", tmp_path / "saved")
    assert {**first, **later} == pytest.approx(expected, rel=1e-5)
    for folder, package in (("saved", "stages"), ("alone", "one")):
        command = [
            sys.executable,
            "convert.py",
            "--to-original",
            tmp_path / folder / "step-3",
            tmp_path / f"{folder}.pt",
        ]
        subprocess.run(command, cwd=tmp_path / package, check=True, timeout=HANGS)
    state, alone = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("saved", "alone"))
    module, _ = load_model(SPEC, {"dropout": 0.0}, device="cpu")
    assert isinstance(module, nn.Module) and state.keys() == alone.keys()
    assert not module.load_state_dict(state, strict=False).missing_keys
    for name, value in state.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-6)
    command = [sys.executable, "convert.py", "--to-sharded", tmp_path / "alone.pt", tmp_path / "again"]
    subprocess.run(command, cwd=tmp_path / "stages", check=True, timeout=HANGS)
    assert torchrun(tmp_path / "stages", 2, "--steps", 1, "--resume", tmp_path / "again").keys() == {1}
