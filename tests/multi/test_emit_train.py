"""The emitted train.py and convert.py as a user runs them: torchrun on gloo, real loaders, weights and checkpoints."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.load_model import load_model
from autoshard.ir.mesh import Mesh
from autoshard.package.output_folder import write_package
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests import launched
from tests.launched import run

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

OWN_RANDOM_NUMBERS = """
import torch

def make_loader(rank):
    generator = torch.Generator().manual_seed(rank)
    while True:
        ids = torch.randint(0, 29, (4, 8), generator=generator)
        yield ids, torch.ones_like(ids)
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
        "tensor": search(graph, hardware, SearchRequest(meshes["tensor"], strategy="megatron")),
        "other": random_plan(PlanningContext(graph, meshes["other"], hardware), 1),
        "alone": random_plan(PlanningContext(graph, meshes["alone"], hardware), 0),
    }
    for name, plan in plans.items():
        write_package(root / name, emit(lower(plan, graph), plan, graph))
    torch.manual_seed(0)
    model, _ = load_model(GPT2, SIZES, device="cpu")
    torch.save(model.state_dict(), root / "weights.pt")
    (root / "data.py").write_text(LOADER)
    return Packages(root / "tensor", root / "other", root / "alone", root / "data.py", root / "weights.pt", model)


def torchrun(package: Path, processes: int, *options: object) -> subprocess.CompletedProcess[str]:
    return launched.torchrun(package / "train.py", processes, "--backend", "gloo", *options)


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
    by_step = losses(first) | losses(second) | losses(third)
    assert sorted(by_step) == [1, 2, 3, 4]
    expected = dict(enumerate(original_losses(packages), 1))
    assert by_step == pytest.approx(expected, abs=2e-5)
    assert "resumed" in second.stdout and second.stdout.count("step 3:") == 1  # rank 0 only

    back = run([packages.other / "convert.py", "--to-original", f"{saved}/step-3", f"{tmp_path}/w.pt"])
    assert back.returncode == 0, back.stderr
    trained = torch.load(tmp_path / "w.pt", weights_only=True)
    packages.model.load_state_dict(trained)
    assert trained["lm_head.weight"].data_ptr() == trained["transformer.wte.weight"].data_ptr()
    ids = torch.randint(0, 29, (4, 8), generator=torch.Generator().manual_seed(100 + 3))
    assert float(packages.model(ids, ids).detach()) == pytest.approx(by_step[4], abs=2e-5)


def test_weights_make_the_round_trip_bit_for_bit(packages: Packages, tmp_path: Path) -> None:
    convert = [str(packages.tensor / "convert.py")]
    there = run([*convert, "--to-sharded", str(packages.weights), str(tmp_path / "sharded")])
    assert there.returncode == 0, there.stderr
    assert not there.stderr
    back = run([*convert, "--to-original", str(tmp_path / "sharded"), str(tmp_path / "back.safetensors")])
    assert back.returncode == 0, back.stderr
    resharded = run([*convert, "--to-sharded", str(tmp_path / "back.safetensors"), str(tmp_path / "again")])
    assert resharded.returncode == 0, resharded.stderr
    last = run([*convert, "--to-original", str(tmp_path / "again"), str(tmp_path / "last.pt")])
    assert last.returncode == 0, last.stderr
    original = torch.load(packages.weights, weights_only=True)
    restored = torch.load(tmp_path / "last.pt", weights_only=True)
    assert restored.keys() == original.keys()
    for name, value in original.items():
        assert torch.equal(restored[name], value), name


def test_mistakes_get_one_clear_sentence(packages: Packages, tmp_path: Path) -> None:
    wrong_shape = torchrun(packages.tensor, 2, "--data", f"{packages.loader}:short_batches")
    assert wrong_shape.returncode != 0
    expected = ": input 'input_ids': expected the global shape (4, 8) or the local (4, 8), got (3, 8)"
    assert (
        expected in wrong_shape.stderr
        and 'Traceback (most recent call last):\n  File "' + str(packages.tensor) not in wrong_shape.stderr
    )

    alone = run([str(packages.tensor / "train.py"), "--backend", "gloo", "--steps", "3"])
    assert alone.returncode == 2
    assert "the mesh tp=2 needs 2 processes, 1 process was started" in alone.stderr
    assert "torchrun --nproc-per-node 2 train.py --backend gloo --steps 3" in alone.stderr

    torch.save({"other": torch.zeros(2)}, tmp_path / "wrong.pt")
    convert = [str(packages.tensor / "convert.py"), "--to-sharded", str(tmp_path / "wrong.pt")]
    lacking = run([*convert, str(tmp_path / "out")])
    assert lacking.returncode == 2 and "lacks transformer.wte.weight" in lacking.stderr
    assert not (tmp_path / "out").exists()


def one_process(packages: Packages, *options: object) -> subprocess.CompletedProcess[str]:
    return run([str(packages.alone / "train.py"), "--backend", "gloo", *map(str, options)])


def test_one_device_needs_no_torchrun(packages: Packages) -> None:
    dry = one_process(packages, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "input input_ids: global (4, 8), local (4, 8)" in dry.stdout
    assert sorted(losses(one_process(packages, "--steps", 3, "--log-every", 2))) == [2, 3]


def test_synthetic_training_is_reproducible(packages: Packages) -> None:
    first, second = (losses(one_process(packages, "--steps", 2, "--seed", 7)) for _ in range(2))
    assert first == second


def test_resume_goes_on_with_the_seed_and_the_learning_rate(packages: Packages, tmp_path: Path) -> None:
    options = ("--steps", 3, "--seed", 7, "--lr", 1e-2)
    straight = losses(one_process(packages, *options, "--save", tmp_path, "--save-every", 1))
    resumed = losses(one_process(packages, "--steps", 3, "--resume", tmp_path / "step-1"))
    assert resumed == {2: straight[2], 3: straight[3]}
    other = losses(one_process(packages, "--steps", 3, "--resume", tmp_path / "step-1", "--lr", 0.5))
    assert other[2] == straight[2] and other[3] != straight[3]  # what is asked for goes before the checkpoint
    assert "nothing to do: 3 steps are done" in one_process(packages, "--steps", 2, "--resume", tmp_path).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--log-every", 0), "--log-every 0: expected 1 or more"),
        (("--max-norm", -1), "--max-norm -1: expected more than 0"),
        (("--steps", -1), "--steps -1: expected 0 or more"),
        pytest.param(
            ("--backend", "nccl"),
            "--backend nccl needs 1 CUDA devices on this node, torch finds 0",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices"),
        ),
    ],
)
def test_options_that_make_no_sense_are_named(packages: Packages, options: tuple[object, ...], message: str) -> None:
    done = one_process(packages, *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_an_error_of_another_rank_than_the_first_is_said_too(packages: Packages, tmp_path: Path) -> None:
    loader = "import os, torch\ndef make_loader():\n    while os.environ['RANK'] == '0':\n"
    (tmp_path / "data.py").write_text(
        loader + "        yield [torch.zeros(4, 8, dtype=torch.int64)] * 2\n    yield from ()\n"
    )
    done = torchrun(packages.tensor, 2, "--data", f"{tmp_path}/data.py:make_loader")
    assert done.returncode != 0 and "error on rank 1: --data" in done.stderr


def test_ranks_that_got_other_data_for_the_same_part_are_told(packages: Packages, tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(OWN_RANDOM_NUMBERS)
    done = torchrun(packages.tensor, 2, "--data", f"{tmp_path}/data.py:make_loader")
    assert done.returncode != 0 and "ranks that hold the same part of 'input_ids' got different values" in done.stderr
    assert "'labels'" not in done.stderr


def to_sharded(packages: Packages, weights: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return run([str(packages.alone / "convert.py"), "--to-sharded", str(weights), str(folder)])


def test_weights_that_the_model_has_not_are_noted(packages: Packages, tmp_path: Path) -> None:
    state = torch.load(packages.weights, weights_only=True)
    torch.save(state | {"score.weight": torch.ones(2, 48)}, tmp_path / "more.pt")
    done = one_process(packages, "--steps", 1, "--weights", tmp_path / "more.pt")
    assert f"note: --weights {tmp_path}/more.pt: ignored 1 that the model does not have: score.weight\n" in done.stdout
    assert "ignored" not in one_process(packages, "--steps", 1, "--weights", packages.weights).stdout


def test_weights_in_the_old_format_of_torch_are_read(packages: Packages, tmp_path: Path) -> None:
    state = torch.load(packages.weights, weights_only=True)
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    done = to_sharded(packages, tmp_path / "pytorch_model.bin", tmp_path / "sharded")
    assert done.returncode == 0 and (tmp_path / "sharded" / ".metadata").exists(), done.stderr


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_damaged_weights_file_is_an_error_that_names_it(packages: Packages, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("damaged")
    done = to_sharded(packages, tmp_path / name, tmp_path / "sharded")
    assert done.returncode == 2 and done.stderr.startswith(f"error: {name} can't be read: ")


def test_converting_deletes_no_folder_of_something_else(packages: Packages, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "only_copy.tex").write_text("years")
    done = to_sharded(packages, packages.weights, tmp_path / "thesis")
    assert done.returncode == 2 and "thesis holds something other than a checkpoint" in done.stderr
    assert (tmp_path / "thesis" / "only_copy.tex").read_text() == "years"
