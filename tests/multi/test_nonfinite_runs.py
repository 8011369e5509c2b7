"""Runs that come to NaN, as their commands start them: what was good is kept, and the exit code is their own."""

from __future__ import annotations

from pathlib import Path

import pytest

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
from tests.slow import slow
from tests.small_models import spec

LOADER = """
import torch

def make_loader():
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
        yield x * float("nan") if step // MICRO == 2 else x, y
"""


def package(folder: Path, stages: int) -> Path:
    graph = capture(spec("residual"), {})
    plan = random_plan(
        PlanningContext(graph, Mesh.parse("dp=2" if stages == 1 else "dp=1"), load_hardware("cpu-local")), 3
    )
    micro_batches = 2 if stages > 1 else 1
    if stages > 1:
        plan = with_step(plan, graph, StepRequest(micro_batches=micro_batches, stages=stages))
    write_package(folder / "package", emit(lower(plan, graph), plan, graph))
    (folder / "data.py").write_text(LOADER.replace("MICRO", str(micro_batches)), encoding="utf-8")
    return folder / "package"


def run(package: Path, *options: str) -> tuple[list[int], str]:
    words = ["--backend", "gloo", "--data", f"{package.parent}/data.py:make_loader"]
    words += ["--save", str(package.parent / "kept"), "--save-every", "1", *options]
    done = launched.torchrun(package / "train.py", 2, *words)
    return list(done.codes), done.stdout + done.stderr


@pytest.mark.parametrize("stages", [slow(1), 2])
def test_a_run_that_comes_to_nan(tmp_path: Path, stages: int) -> None:
    folder = package(tmp_path, stages)
    codes, said = run(folder, "--steps", "5", "--save-async")
    assert 7 in codes and "error: loss nan" in said and "nothing is updated" in said, said
    assert -6 not in codes and "step 2: loss" in said and "step 3: loss" not in said
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-1", "step-2"]
    codes, said = run(folder, "--steps", "5", "--resume", str(tmp_path / "kept"), "--nonfinite", "skip:1")
    assert codes == [0, 0] and "left out, 1 in a row" in said and "step 5: loss" in said, said
    assert "nan" not in said.partition("step 4:")[2]
    codes, said = run(folder, "--steps", "9", "--lr", "1e30", "--resume", str(tmp_path / "kept"))
    assert 7 in codes, said
    assert not (tmp_path / "kept" / "step-9").exists()
