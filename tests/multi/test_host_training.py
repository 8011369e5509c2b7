"""A package with tables on the host trains, and its checkpoints are the ordinary ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autoshard
from tests import launched
from tests.hangs import HANGS

EXAMPLE, SIZES = "examples/dlrm.py:build", {"batch": 16, "rows": 100, "width": 8, "tables": 4}
PINS = ["bags.0.weight=Shard(0)@dp,host", "tables.1.weight=Shard(1)@dp,host"]


def torchrun(package: Path, *options: object) -> list[str]:
    done = launched.torchrun(package / "train.py", 2, "--backend", "gloo", *options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def losses(lines: list[str]) -> dict[str, str]:
    """Step -> its loss and norm."""
    steps = [line.split(",") for line in lines if line.startswith("step ")]
    return {first.partition(":")[0]: first.partition(":")[2] + norm for first, norm, *_ in steps}


@pytest.mark.slow
def test_checkpoints_go_between_the_memories(tmp_path: Path) -> None:
    for name, pins in (("host", PINS), ("device", [])):
        plan = autoshard.plan(EXAMPLE, hardware="a100-80g-sxm", mesh="dp=2", pins=pins, arguments=SIZES)
        assert sum(p.layout.host for p in plan.plan.parameters) == len(pins)
        autoshard.write(plan, tmp_path / name)
    whole = losses(torchrun(tmp_path / "host", "--steps", 4, "--save", tmp_path / "saved", "--save-every", 2))
    assert len(whole) == 4
    for package in ("host", "device"):
        resumed = losses(torchrun(tmp_path / package, "--steps", 4, "--resume", tmp_path / "saved" / "step-2"))
        assert resumed == {step: whole[step] for step in ("step 3", "step 4")}
    words = ["--to-original", str(tmp_path / "saved" / "step-4"), str(tmp_path / "weights.pt")]
    subprocess.run([sys.executable, str(tmp_path / "host" / "convert.py"), *words], check=True, timeout=HANGS)
    saved = torch.load(tmp_path / "weights.pt")
    assert saved["bags.0.weight"].shape == saved["tables.1.weight"].shape == (100, 8)
