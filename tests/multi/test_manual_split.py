"""A table in unequal parts trains as one in equal parts does; its checkpoints load on other meshes, in other parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autoshard
from tests import launched
from tests.checkpoint_worker import State, run_ranks

MODEL = """
import torch


class Ranker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.users = torch.nn.Embedding(64, 8)
        self.top = torch.nn.Linear(8, 3)

    def forward(self, ids, labels):
        return torch.nn.functional.cross_entropy(self.top(self.users(ids).mean(1)), labels)


def build():
    return Ranker(), (torch.randint(0, 64, (8, 4)), torch.randint(0, 3, (8,)))
"""
PLANS = {
    "four": (4, "tp=4", {"users.weight": (((10, 20, 30, 4), 1),), "users": (((10, 20, 30, 4), 1), None)}),
    "two": (2, "tp=2", {"users.weight": "S0[50+14]@tp"}),
    "zero": (4, "dp=2,tp=2", {"users.weight": "Shard(1)@dp,S0[1+63]@tp"}),
    "alone": (1, "dp=1", {}),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables")
    (root / "ranker.py").write_text(MODEL, encoding="utf-8")
    captured = autoshard.capture(f"{root / 'ranker.py'}:build")
    for name, (_, mesh, pins) in PLANS.items():
        autoshard.write(autoshard.plan(captured, hardware="cpu-local", mesh=mesh, pins=pins), root / name)
    return root


def assert_close(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(state[name], value, atol=1e-6), name


@pytest.mark.slow
def test_checkpoints_of_unequal_parts(packages: Path, tmp_path: Path) -> None:
    trained = run_ranks(packages / "four", 4, tmp_path / "none", tmp_path / "saved", steps=2)
    assert trained["users.weight"].shape == trained["users.weight: exp_avg"].shape == (64, 8)
    assert_close(run_ranks(packages / "alone", 1, tmp_path / "none", steps=2), trained)  # the same numbers
    for name in ("two", "zero", "alone"):
        restored = run_ranks(packages / name, PLANS[name][0], tmp_path / "saved")
        assert all(torch.equal(restored[key], value) for key, value in trained.items())
    further = run_ranks(packages / "zero", 4, tmp_path / "saved", tmp_path / "again", steps=1)
    assert not torch.equal(further["users.weight"], trained["users.weight"])
    assert_close(run_ranks(packages / "four", 4, tmp_path / "again"), further)

    convert = [packages / "two" / "convert.py", "--to-original", tmp_path / "again", tmp_path / "back.pt"]
    launched.run(convert).check_returncode()
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert torch.equal(back["users.weight"], further["users.weight"])


@pytest.mark.slow
def test_a_table_of_one_place_is_saved_at_once_by_all(packages: Path, tmp_path: Path) -> None:
    """Not in the background by those that hold none of it, which the others would wait for."""
    pins = ("place:users=0", "place:top=1", "users.weight=S0[50+14]@tp")
    plan = autoshard.plan(f"{packages / 'ranker.py'}:build", hardware="cpu-local", mesh="tp=2", pins=pins)
    autoshard.write(plan, tmp_path / "placed")
    train, args = tmp_path / "placed" / "train.py", ("--backend", "gloo", "--save", tmp_path / "saved", "--save-async")
    for steps in (1, 2):
        done = launched.torchrun(train, 4, *args, "--steps", steps, "--resume", "auto", limit=200.0)
        assert done.returncode == 0 and "is written at once" in done.stdout, done.stderr
