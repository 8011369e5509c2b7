"""`verify_package` on a folder: full size or reduced, what was left out, and every way that a request is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoshard.cli import commands
from autoshard.errors import UsageError
from autoshard.graph_capture.load_model import load_model
from autoshard.verification import verify_folder, verify_package

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT2 = f"{EXAMPLES / 'gpt2.py'}:build"


def plan(model: str, out: Path, *words: str) -> None:
    command = ["plan", model, "--mesh", "dp=2,tp=2", "--hardware", "a100-80g-sxm", "--strategy", "megatron"]
    assert commands.main([*command, "--out", str(out), *words]) == 0


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of GPT-2 with three layers, too large to verify at full size in a test."""
    out = tmp_path_factory.mktemp("packages") / "gpt2"
    plan(GPT2, out, "--with", "n_layer=3")
    return out


@pytest.mark.slow
def test_reduced_sizes_are_said(gpt2: Path) -> None:
    proof = verify_package(gpt2, backend="lockstep", arguments={"sequence": 8})
    assert proof.passed, proof.failure
    assert proof.reduced == (
        ("n_embd", "96", "768"), ("n_layer", "2", "3"), ("sequence", "8", "256"), ("vocabulary", "97", "50257")
    )  # fmt: skip
    assert "n_layer 2 (planned 3)" in proof.summary()
    assert {kind.kind: kind.count for kind in proof.kinds}["precision"], "a step in its own precision, at any size"
    assert json.loads(json.dumps(proof.as_dict()))["reduced"][1] == {
        "argument": "n_layer", "verified": "2", "planned": "3"
    }  # fmt: skip


def test_a_reduction_that_loses_unevenness_is_refused(gpt2: Path) -> None:
    with pytest.raises(UsageError, match="is split evenly, planned 50257 is unevenly"):
        verify_package(gpt2, backend="lockstep", arguments={"vocabulary": 96})


def test_full_size_and_reduced_at_once_is_refused(gpt2: Path) -> None:
    with pytest.raises(UsageError, match="full size and n_layer at once"):
        verify_package(gpt2, full=True, arguments={"n_layer": 1})


def test_an_unknown_argument_is_refused(gpt2: Path) -> None:
    with pytest.raises(UsageError, match="no argument 'layers'"):
        verify_package(gpt2, backend="lockstep", arguments={"layers": 1})


MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width)
    def forward(self, x, labels):
        return torch.nn.functional.cross_entropy(self.norm(self.linear(x)), labels)
def build(width: int = 5):
    return Net(width), (torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64))
"""


@pytest.fixture
def small_model(tmp_path: Path) -> str:
    (tmp_path / "small.py").write_text(MODEL)
    return f"{tmp_path / 'small.py'}:build"


def test_a_model_of_the_user_with_buffers_and_equal_examples(small_model: str, tmp_path: Path) -> None:
    plan(small_model, tmp_path / "out")
    proof = verify_package(tmp_path / "out", backend="lockstep")
    assert proof.passed, proof.failure
    assert proof.reduced == ()
    assert {kind.kind: kind.count for kind in proof.kinds}["buffer"] == 3 * 3 * 4


def test_the_proof_of_a_package_that_can_not_be_written_to_is_shown(
    small_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(small_model, tmp_path / "out")
    (tmp_path / "out" / "verification.json").mkdir()
    assert commands.main(["verify", str(tmp_path / "out"), "--backend", "lockstep"]) == 0
    assert "with no record in the package: can't write" in capsys.readouterr().out


def test_no_smaller_sizes_are_named(small_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(small_model, tmp_path / "out")
    monkeypatch.setattr(verify_folder, "is_quick", lambda *_: False)
    with pytest.raises(UsageError, match="too large to verify here at full size"):
        verify_package(tmp_path / "out", backend="lockstep")
    proof = verify_package(tmp_path / "out", backend="lockstep", full=True)
    assert proof.passed, proof.failure


def test_a_saved_graph_has_no_model_to_compare_with(small_model: str, tmp_path: Path) -> None:
    saved = tmp_path / "small.graph.json"
    assert commands.main(["trace", small_model, "-o", str(saved)]) == 0
    plan(str(saved), tmp_path / "out")
    with pytest.raises(UsageError, match="the original model is needed"):
        verify_package(tmp_path / "out", backend="lockstep")


def test_an_exported_program_with_tied_weights(tmp_path: Path) -> None:
    sizes = {"n_layer": 1, "sequence": 8, "n_embd": 48, "vocabulary": 97}
    model, inputs = load_model(GPT2, sizes, "cpu")
    exported = torch.export.export(model.train(), tuple(x.clone() for x in inputs), strict=False)
    torch.export.save(exported, tmp_path / "gpt2.pt2")
    plan(str(tmp_path / "gpt2.pt2"), tmp_path / "out")
    proof = verify_package(tmp_path / "out", backend="lockstep")
    assert proof.passed, proof.failure
