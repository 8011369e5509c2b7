"""Packages of placed models as they run: MindSpore's example, on real digits, and what a run of one leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StagePin, StepRequest
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.workflow import make_plan
from examples import placed_lenet
from tests.launched import run, torchrun

ROOT = Path(__file__).resolve().parents[2]
SPEC = str(ROOT / "examples" / "placed_lenet.py")
STEPS = 50


@cache
def captured() -> Graph:
    return capture(f"{SPEC}:build", {"double": True})


def written(folder: Path, step: StepRequest, mesh: str = "dp=1", strategy: str = "best") -> Path:
    graph = captured()
    result = make_plan(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse(mesh), step=step, strategy=strategy))
    plan = result.plan
    write_package(folder, dict(emit(lower(plan, graph), plan, graph)))
    return folder


@pytest.fixture(scope="module")
def alone() -> tuple[dict[int, float], placed_lenet.LeNet]:
    """Losses of one process in float64, and the trained model."""
    model, _ = placed_lenet.build(double=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = {}
    for step, (images, labels) in zip(range(1, STEPS + 1), placed_lenet.make_loader(), strict=False):
        optimizer.zero_grad()
        loss = model(images.double(), labels)
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses, model


def trained(package: Path, processes: int, tmp: Path, *options: object) -> list[dict[str, float]]:
    start = tmp / "start.pt"
    torch.save(placed_lenet.build(double=True)[0].state_dict(), start)
    log = tmp / f"log{len(list(tmp.glob('log*')))}.jsonl"
    common = ("--backend", "gloo", "--data", f"{SPEC}:make_loader", "--lr", "1e-3", "--max-norm", "inf")
    weights = () if "--resume" in options else ("--weights", start)
    done = torchrun(package / "train.py", processes, *common, *weights, "--log-json", log, *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_the_documented_example(tmp_path: Path, alone: tuple[dict[int, float], placed_lenet.LeNet]) -> None:
    losses, model = alone
    package = written(tmp_path / "placed", StepRequest())
    checked = ("--eval-data", f"{SPEC}:make_evaluation", "--eval-batches", 9, "--save", tmp_path / "saved")
    rows = trained(package, 5, tmp_path, "--steps", STEPS, *checked)
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, STEPS + 1)]
    for row in rows:
        if "loss" in row:  # what is logged is summed over places in float32
            assert row["loss"] == pytest.approx(losses[int(row["step"])], rel=1e-6)
    with torch.no_grad():
        batches = [float(model(images.double(), labels)) for images, labels in placed_lenet.make_evaluation()]
    assert rows[-1]["eval_loss"] == pytest.approx(sum(batches) / len(batches), rel=1e-6)
    assert run([package / "convert.py", "--to-original", tmp_path / "saved", tmp_path / "w.pt"]).returncode == 0
    restored = placed_lenet.build(double=True)[0]
    restored.load_state_dict(torch.load(tmp_path / "w.pt"))
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(restored.state_dict()[name], expected, rtol=1e-10, atol=1e-12)
    assert placed_lenet.accuracy(restored) == placed_lenet.accuracy(model)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "levels"), [("best", (None, None)), ("dp", (1, 3))])
def test_places_of_different_sizes(
    tmp_path: Path, alone: tuple[dict[int, float], placed_lenet.LeNet], strategy: str, levels: tuple[int | None, ...]
) -> None:
    """Three devices: trained, evaluated, and gone on with on two places of other sizes, at another level of ZeRO."""
    on = {"conv1": 0, "conv2": 0, "fc1": 1, "fc2": 1, "fc3": 1}
    pins = tuple(StagePin(path, place) for path, place in on.items())
    steps = [StepRequest(places=pins, place_mesh=meshes) for meshes in (("1:dp=2",), ("0:tp=2",))]
    requests = [replace(step, zero=zero) for step, zero in zip(steps, levels, strict=True)]
    first = written(tmp_path / "first", requests[0], "dp=1", strategy)
    checked = ("--eval-data", f"{SPEC}:make_evaluation", "--eval-batches", 2)
    rows = trained(first, 3, tmp_path, "--steps", 3, "--save", tmp_path / "saved", *checked)
    second = written(tmp_path / "second", requests[1], "dp=1", strategy)
    rows += trained(second, 3, tmp_path, "--steps", 5, "--resume", tmp_path / "saved")
    assert [int(row["step"]) for row in rows if "loss" in row] == [1, 2, 3, 4, 5]
    for row in rows:
        if "loss" in row:
            assert row["loss"] == pytest.approx(alone[0][int(row["step"])], rel=1e-6)
    assert run([first / "convert.py", "--to-original", tmp_path / "saved", tmp_path / "w.pt"]).returncode == 0
    assert {*torch.load(tmp_path / "w.pt")} == {*alone[1].state_dict()}
