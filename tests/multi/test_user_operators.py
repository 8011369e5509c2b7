"""A model with an operator of its own, in the user's file: planned, verified on gloo, and trained by torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cli import commands
from tests import launched

MODEL = """
import torch
from torch import nn

@torch.library.custom_op("autoshard_user::swish", mutates_args=())
def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)

@swish.register_fake
def _(x):
    return torch.empty_like(x)

def backward(ctx, g):
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(x)
    return g * s * (1 + x * (1 - s))

swish.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(swish(self.up(x))), y)

def build():
    return Model(), (torch.zeros(4, 6), torch.zeros(4, 6))
"""


@pytest.mark.processes
@pytest.mark.slow
def test_an_operator_of_the_users_file_goes_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(MODEL, encoding="utf-8")  # hides no file of the package
    out = tmp_path / "out"
    words = ["plan", f"{tmp_path}/train.py:build", "--mesh", "tp=2", "--hardware", "cpu-local", "--out", str(out)]
    assert commands.main([*words, "--strategy", "megatron", "--verify"]) == 0
    assert "verified on tp=2: 2 gloo processes" in capsys.readouterr().out
    assert (out / "user_operators" / "train.py").read_text(encoding="utf-8") == MODEL
    assert "`user_operators/train.py`, a copy of the file" in (out / "README.md").read_text(encoding="utf-8")

    done = launched.torchrun(out / "train.py", 2, "--backend", "gloo", "--steps", 2, cwd=out.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2: loss" in done.stdout
