"""Each block of a package compiles whole, collectives included, and has the gradients of the block as it is."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.emit.runtime import ParallelMesh, compile_blocks, random_dropout
from autoshard.emit.runtime.randomness import Random
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.fixed_step import with_step
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.ranks.lockstep import run_lockstep
from tests import launched
from tests.slow import slow

TESTS = Path(__file__).parents[1]
MODELS = {
    "gpt2": "decoders.py:gpt2", "llama": "decoders.py:llama", "vit": "vision.py:vit", "mixtral": "decoders.py:mixtral"
}  # fmt: skip
PLANS = [("tp=2", "megatron-sp"), ("dp=2", "fsdp"), ("tp=2", "megatron")]


def compiled(spec: str, mesh: str, style: str, backend: str, folder: Path, recompute: str | None = None) -> str:
    """What the first rank says. `recompute`: what is computed again, as `--recompute` says it."""
    graph = capture(f"{TESTS / 'models'}/{spec}", {"batch": 4})
    plan = search(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse(mesh), strategy=style))
    if recompute is not None:
        plan = with_step(plan, graph, StepRequest(recompute=recompute))
    write_package(folder, emit(lower(plan, graph), plan, graph))
    done = launched.torchrun(TESTS / "compile_worker.py", 2, folder, backend)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "style"), PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_every_block_is_one_graph(model: str, mesh: str, style: str, tmp_path: Path) -> None:
    said = compiled(MODELS[model], mesh, style, "aot_eager", tmp_path / "package")
    match = re.search(r"^(\d+) blocks, error (\S+)$", said, re.MULTILINE)
    assert match and int(match[1]) >= 2 and float(match[2]) < 1e-5


@pytest.mark.parametrize("again", [slow("communicated"), slow("full")])
def test_a_compiled_block_is_computed_again_with_all_that_it_communicates(again: str, tmp_path: Path) -> None:
    """Nothing leaves its graph to be kept, and all ranks communicate alike."""
    said = compiled(MODELS["llama"], "tp=2", "megatron-sp", "aot_eager", tmp_path / "package", again)
    assert ("kept=True" in (tmp_path / "package" / "model_parallel.py").read_text()) == (again == "communicated")
    match = re.search(r"^(\d+) blocks, error (\S+)$", said, re.MULTILINE)
    assert match and float(match[2]) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_blocks_of_llama_run_as_inductor_writes_them(tmp_path: Path) -> None:
    said = compiled(MODELS["llama"], "tp=2", "megatron-sp", "inductor", tmp_path / "package")
    match = re.search(r"^(\d+) blocks, error (\S+)$", said, re.MULTILINE)
    assert match and int(match[1]) == 2 and float(match[2]) < 1e-4


class Dropping(nn.Module):
    def __init__(self, random: Random, first_random: int) -> None:
        super().__init__()
        self.random, self.first_random = random, first_random

    def forward(self, x: Tensor) -> Tensor:
        return random_dropout(x, self.random, p=0.5, index=self.first_random, shape=(4, 4), layout="R")


class Many(nn.Module):
    def __init__(self, mesh: ParallelMesh, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropping(mesh.random, number) for number in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


def test_more_blocks_than_dynamo_has_versions_of_a_function_draw_their_own_numbers() -> None:
    def drawn(mesh: ParallelMesh) -> Tensor:
        model = Many(mesh, 10)
        assert compile_blocks(model, "eager") == 10
        return model(torch.ones(4, 4))

    (output,) = run_lockstep({"dp": 1}, drawn)
    assert len({row.numpy().tobytes() for row in output}) == 10
