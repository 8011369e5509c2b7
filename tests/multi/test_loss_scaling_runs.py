"""Runs in fp16-mixed as their commands start them: one rank overflows in a step, and a checkpoint goes on as it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.fixed_step import with_step
from autoshard.search.fixed_styles import random_plan
from tests import launched

PLANTED = """if mesh.global_rank == 1 and mesh.random.step == 2:
            from runtime import local

            with torch.no_grad():
                local(next(p.grad for p in model.parameters() if p.grad is not None)).view(-1)[0] = math.inf
        scaler.unscale_(optimizer)"""


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=8, vocab_size=40, use_cache=False,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip
    ids = torch.randint(0, 40, (4, 8))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def write(folder: Path, mesh: str, stages: int) -> Path:
    graph = capture(f"{__file__}:build", {}, "fp16-mixed")
    plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), load_hardware("v100-32g-sxm2")), 3)
    plan = with_step(plan, graph, StepRequest(micro_batches=2, stages=stages))
    files = dict(emit(lower(plan, graph), plan, graph))
    assert "scaler.unscale_(optimizer)" in files["train.py"]
    files["train.py"] = files["train.py"].replace("scaler.unscale_(optimizer)", PLANTED)
    write_package(folder, files)
    return folder


def run(package: Path, *options: object) -> dict[int, list[float]]:
    """Step -> loss, norm, scale, steps skipped."""
    done = launched.torchrun(package / "train.py", 2, "--backend", "gloo", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lr_scheduler" not in done.stderr
    said = r"step (\d+): loss (\S+), gradient norm (\S+), loss scale (\S+), steps skipped (\d+),"
    return {int(step): [float(x) for x in values] for step, *values in re.findall(said, done.stdout)}


def test_a_step_is_left_out_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    wide, stages = write(tmp_path / "wide", "dp=2", 1), write(tmp_path / "stages", "dp=1", 2)
    options = ("--loss-scale", 1024, "--lr", "1e-2", "--schedule", "linear")
    whole = run(wide, *options, "--steps", 4, "--save", tmp_path / "saved", "--save-every", 2)
    assert [values[2:] for values in whole.values()] == [[1024, 0], [512, 1], [512, 1], [512, 1]]
    resumed = run(wide, *options[2:], "--steps", 4, "--resume", tmp_path / "saved" / "step-2")
    assert resumed == {3: whole[3], 4: whole[4]}
    apart = run(stages, *options, "--steps", 4)
    assert [values[2:] for values in apart.values()] == [values[2:] for values in whole.values()]
    for step in (1, 3, 4):
        assert apart[step] == pytest.approx(whole[step], rel=5e-3)
