"""A ViT on two devices with data parallelism and a Llama on four with tensor parallelism, as six processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.workflow import make_plan
from examples import vision_language
from tests.launched import torchrun

SPEC = str(Path(__file__).resolve().parents[2] / "examples" / "vision_language.py")
STEPS = 4


@pytest.mark.slow
def test_six_processes_have_the_loss_of_one(tmp_path: Path) -> None:
    graph = capture(f"{SPEC}:build", {"double": True})
    step = StepRequest(place_mesh=("1:dp=2,tp=2",))
    request = SearchRequest(Mesh.parse("dp=2"), step=step)
    plan = make_plan(graph, load_hardware("cpu-local"), request).plan
    assert [str(mesh) for mesh in plan.meshes] == ["dp=2", "dp=2,tp=2"]
    write_package(tmp_path / "out", dict(emit(lower(plan, graph), plan, graph)))

    model, batch = vision_language.build(double=True)
    torch.save(model.state_dict(), tmp_path / "start.pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    options = ("--backend", "gloo", "--data", f"{SPEC}:make_loader", "--lr", "1e-3", "--max-norm", "inf")
    run_options = ("--weights", tmp_path / "start.pt", "--log-json", tmp_path / "log", "--steps", STEPS)
    done = torchrun(tmp_path / "out" / "train.py", 6, *options, *run_options)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses, rel=1e-6)
