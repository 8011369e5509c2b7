"""The emitted train.py and convert.py as a user runs them: torchrun on gloo, real loaders, weights and checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.emit import emit
from autoshard.folder import write_package
from autoshard.graph.capture import capture
from autoshard.graph.load import load_model
from autoshard.hardware import load_hardware
from autoshard.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search import megatron_plan, random_plan

GPT2 = "examples/gpt2.py:build"
SIZES = {"n_layer": 1, "sequence": 8, "n_embd": 48, "vocabulary": 29, "dropout": 0.0}
STEPS = 4
LOADER = """
import torch

def make_loader(seed, inputs):
    for step in range(4):
        generator = torch.Generator().manual_seed(100 + step)
        shape = inputs["input_ids"][0]
        ids = torch.randint(0, 29, shape, generator=generator)
        yield {"labels": ids, "input_ids": ids}

def short_batches():
    yield torch.zeros(3, 8, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.int64)
"""


@dataclass(frozen=True)
class Packages:
    """One model planned twice: Megatron over tp=2 (blocked QKV, cut vocabulary, a tie), and at random over dp=2."""

    tensor: Path
    other: Path
    alone: Path
    loader: Path
    weights: Path
    model: nn.Module


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    root = tmp_path_factory.mktemp("packages")
    graph, hardware = capture(GPT2, SIZES), load_hardware("cpu-local")
    meshes = {name: Mesh.parse(text) for name, text in {"tensor": "tp=2", "other": "dp=2", "alone": "dp=1"}.items()}
    plans = {
        "tensor": megatron_plan(graph, meshes["tensor"], hardware),
        "other": random_plan(graph, meshes["other"], hardware, 1),
        "alone": random_plan(graph, meshes["alone"], hardware, 0),
    }
    for name, plan in plans.items():
        write_package(root / name, emit(lower(plan, graph), plan, graph))
    torch.manual_seed(0)
    model, _ = load_model(GPT2, SIZES, device="cpu")
    torch.save(model.state_dict(), root / "weights.pt")
    (root / "data.py").write_text(LOADER)
    return Packages(root / "tensor", root / "other", root / "alone", root / "data.py", root / "weights.pt", model)


def torchrun(package: Path, processes: int, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return run([*command, str(package / "train.py"), "--backend", "gloo", *map(str, options)])


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=240)


def losses(done: subprocess.CompletedProcess[str]) -> dict[int, float]:
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)}


def original_losses(packages: Packages) -> list[float]:
    """The original class trained in one process as train.py does."""
    model = packages.model
    model.load_state_dict(torch.load(packages.weights, weights_only=True))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = []
    for step in range(STEPS):
        ids = torch.randint(0, 29, (4, 8), generator=torch.Generator().manual_seed(100 + step))
        optimizer.zero_grad()
        loss = model(ids, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        result.append(float(loss.detach()))
    return result


def test_training_resumes_on_another_mesh_and_follows_the_original(packages: Packages, tmp_path: Path) -> None:
    data = ("--data", f"{packages.loader}:make_loader", "--lr", 1e-2)
    saved = tmp_path / "saved"
    first = torchrun(packages.tensor, 2, *data, "--steps", 2, "--weights", packages.weights, "--save", saved)
    second = torchrun(packages.other, 2, *data, "--steps", 3, "--resume", saved, "--save", saved)
    third = torchrun(packages.alone, 1, *data, "--steps", 4, "--resume", saved)
    found = losses(first) | losses(second) | losses(third)
    assert sorted(found) == [1, 2, 3, 4]
    expected = dict(enumerate(original_losses(packages), 1))
    assert found == pytest.approx(expected, abs=2e-5)
    assert "resumed" in second.stdout and second.stdout.count("step 3:") == 1  # rank 0 only

    back = run(
        [sys.executable, str(packages.other / "convert.py"), "--to-original", f"{saved}/step-3", f"{tmp_path}/w.pt"]
    )
    assert back.returncode == 0, back.stderr
    trained = torch.load(tmp_path / "w.pt", weights_only=True)
    packages.model.load_state_dict(trained)
    assert trained["lm_head.weight"].data_ptr() == trained["transformer.wte.weight"].data_ptr()
    ids = torch.randint(0, 29, (4, 8), generator=torch.Generator().manual_seed(100 + 3))
    assert float(packages.model(ids, ids).detach()) == pytest.approx(found[4], abs=2e-5)


def test_weights_make_the_round_trip_bit_for_bit(packages: Packages, tmp_path: Path) -> None:
    convert = [sys.executable, str(packages.tensor / "convert.py")]
    there = run([*convert, "--to-sharded", str(packages.weights), str(tmp_path / "sharded")])
    assert there.returncode == 0, there.stderr
    assert not there.stderr
    back = run([*convert, "--to-original", str(tmp_path / "sharded"), str(tmp_path / "back.safetensors")])
    assert back.returncode == 0, back.stderr
    again = run([*convert, "--to-sharded", str(tmp_path / "back.safetensors"), str(tmp_path / "again")])
    assert again.returncode == 0, again.stderr
    last = run([*convert, "--to-original", str(tmp_path / "again"), str(tmp_path / "last.pt")])
    assert last.returncode == 0, last.stderr
    original = torch.load(packages.weights, weights_only=True)
    found = torch.load(tmp_path / "last.pt", weights_only=True)
    assert found.keys() == original.keys()
    for name, value in original.items():
        assert torch.equal(found[name], value), name


def test_mistakes_get_one_clear_sentence(packages: Packages, tmp_path: Path) -> None:
    wrong_shape = torchrun(packages.tensor, 2, "--data", f"{packages.loader}:short_batches")
    assert wrong_shape.returncode != 0
    expected = "error: input 'input_ids': expected the global shape (4, 8) or the local (4, 8), got (3, 8)"
    assert (
        expected in wrong_shape.stderr
        and 'Traceback (most recent call last):\n  File "' + str(packages.tensor) not in wrong_shape.stderr
    )

    alone = run([sys.executable, str(packages.tensor / "train.py"), "--backend", "gloo", "--steps", "3"])
    assert alone.returncode == 2
    assert "the mesh tp=2 needs 2 processes, 1 process was started" in alone.stderr
    assert "torchrun --nproc-per-node 2 train.py --backend gloo --steps 3" in alone.stderr

    torch.save({"other": torch.zeros(2)}, tmp_path / "wrong.pt")
    convert = [sys.executable, str(packages.tensor / "convert.py"), "--to-sharded", str(tmp_path / "wrong.pt")]
    lacking = run([*convert, str(tmp_path / "out")])
    assert lacking.returncode == 2 and "lacks transformer.wte.weight" in lacking.stderr
    assert not (tmp_path / "out").exists()


def one_process(packages: Packages, *options: object) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(packages.alone / "train.py"), "--backend", "gloo", *map(str, options)])


def test_one_device_needs_no_torchrun(packages: Packages) -> None:
    dry = one_process(packages, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "input input_ids: global (4, 8), local (4, 8)" in dry.stdout
    assert sorted(losses(one_process(packages, "--steps", 3, "--log-every", 2))) == [2, 3]


def test_synthetic_training_is_reproducible(packages: Packages) -> None:
    first, second = (losses(one_process(packages, "--steps", 2, "--seed", 7)) for _ in range(2))
    assert first == second
