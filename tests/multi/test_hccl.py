"""`train.py --backend hccl` starts, trains, saves and resumes, on a stand-in for torch_npu that maps it to the CPU.

What it can't show: kernels of Ascend, and HCCL itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.workflow import make_plan
from tests import launched
from tests.captured import captured

BUFFER = 64  # MB
STAND_INS = Path(__file__).parents[1] / "stand_ins"
LOADER = """
import torch

def make_loader(seed, inputs):
    for step in range(4):
        generator = torch.Generator().manual_seed(100 + step)
        ids, labels = torch.randint(0, 11, (2, 4, 6), generator=generator)
        yield {"ids": ids, "labels": labels}
"""


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + nn.functional.dropout(block(x), 0.1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Tagger(), tuple(torch.randint(0, 11, (4, 6)) for _ in range(2))


def train(folder: Path, *options: str) -> dict[str, str]:
    """Step -> what is said of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(STAND_INS)}
    data = ["--data", f"{folder.parent / 'data.py'}:make_loader", "--lr", "1e-2", *options]
    ran = launched.torchrun(folder / "train.py", 2, *data, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count(f"with {{'hccl_buffer_size': {BUFFER}}}") == 2 * (f"dp={BUFFER}" in options)
    return losses(ran.stdout)


def losses(text: str) -> dict[str, str]:
    return dict(re.findall(r"step (\d+): (loss [\d.]+, gradient norm [\d.]+)", text))


def test_hccl_trains_as_gloo_does_and_resumes(tmp_path: Path) -> None:
    """Weights gathered block by block, gradients reduced beside backward, dropout, pinned batches read ahead."""
    folder, saved = tmp_path / "package", str(tmp_path / "saved")
    graph = captured(f"{__file__}:build", {})
    plan = search(graph, load_hardware("ascend-910b1"), SearchRequest(Mesh.parse("dp=2"), strategy="fsdp"))
    write_package(folder, emit(lower(plan, graph), plan, graph))
    (tmp_path / "data.py").write_text(LOADER)
    wanted = train(folder, "--backend", "gloo", "--steps", "3")
    buffer = ("--hccl-buffer", f"dp={BUFFER}")  # of the group over which weights are gathered
    first = train(folder, "--backend", "hccl", "--steps", "2", "--save", saved, "--timeout", "60", *buffer)
    third = train(folder, "--backend", "hccl", "--steps", "3", "--resume", saved, "--matmul-precision", "high")
    assert sorted(wanted) == ["1", "2", "3"]
    assert first | third == wanted


def test_the_precision_of_products_is_told_to_ascend_too(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    graph = captured(f"{__file__}:build", {})
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("dp=1"), strategy="dp"))
    write_package(folder, emit(lower(plan, graph), plan, graph))
    script = """
import torch, torch_npu, train
for precision in ("high", "highest", "medium"):
    train.set_matmul_precision(precision, torch.device("npu", 0))
    print(torch.get_float32_matmul_precision(), torch.npu.matmul.allow_hf32)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{STAND_INS}{os.pathsep}{folder}"}
    ran = launched.run(["-c", script], env=environment)
    assert ran.stdout.split("\n")[:3] == ["high True", "highest False", "medium True"], ran.stderr


def test_ascend_updates_in_one_kernel_where_torch_npu_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    graph = captured(f"{__file__}:build", {})
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("dp=1"), strategy="dp"))
    write_package(folder, emit(lower(plan, graph), plan, graph))
    script = """
import torch, torch_npu, types
from runtime import has_fused_adamw
there = types.SimpleNamespace(device=torch.device("npu", 0), is_floating_point=lambda: True)
here = torch.nn.Parameter(torch.zeros(2))
print(has_fused_adamw([here]), has_fused_adamw([here, there]))
newer = torch.library.Library("aten", "IMPL")
newer.impl("_fused_adamw_", lambda *_, **__: None, "PrivateUse1")
print(has_fused_adamw([here, there]))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{STAND_INS}{os.pathsep}{folder}"}
    ran = launched.run(["-c", script], env=environment)
    assert ran.stdout.split() == ["True", "False", "True"], ran.stderr


def test_stages_on_ascend_and_what_is_said_of_buffers(tmp_path: Path) -> None:
    """Groups of a stage with buffers of their own, and a setting that nothing uses."""
    folder = tmp_path / "package"
    graph = captured(f"{__file__}:build", {})
    step = StepRequest(micro_batches=2, stages=2)
    request = SearchRequest(Mesh.parse("dp=1,tp=1"), strategy="dp", step=step)
    plan = make_plan(graph, load_hardware("ascend-910b1"), request).plan
    write_package(folder, emit(lower(plan, graph), plan, graph))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(STAND_INS)}

    def said(*options: str) -> str:
        ran = launched.torchrun(folder / "train.py", 2, "--steps", 2, *options, env=environment)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    text = said("--backend", "hccl", "--hccl-buffer", "tp=64,dp+tp=32")
    assert text.count("hccl: a group of 1 with {'hccl_buffer_size': 64}") == 2
    assert text.count("--hccl-buffer dp+tp: no collective ran over these axes") == 1
    assert losses(text) == losses(said("--backend", "gloo"))


@pytest.mark.parametrize("asked", ["pp=3", "tp=0", "tp+tp=2", "tp", "tp=1.5"])
def test_buffers_that_can_not_be(asked: str, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    graph = captured(f"{__file__}:build", {})
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("tp=1"), strategy="dp"))
    write_package(folder, emit(lower(plan, graph), plan, graph))
    ran = launched.run([folder / "train.py", "--backend", "hccl", "--hccl-buffer", asked])
    assert ran.returncode == 2 and f"--hccl-buffer {asked}: expected axes of the mesh (tp) and MB" in ran.stderr
