"""mypy finds every name, attribute, method and parameter that the code of a pruned package uses, whoever calls it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cli.commands import main
from tests.hangs import HANGS

GPT2 = ("examples/gpt2.py:build", "--with", "n_layer=2", "--mesh")
DLRM = ("examples/dlrm.py:build", "--parameter-servers", "2")
VISION = ("examples/vision_language.py:build", "--stages", "2", "--mesh", "dp=1", "--place-mesh", "1:tp=2")
PARTS = ("--stages", "2", "--micro-batches", "4")
PLANS = {
    "tensor": (*GPT2, "tp=2"),
    "stages": (*GPT2, "dp=2", *PARTS),
    "virtual": (*GPT2, "dp=2", *PARTS, "--virtual-stages", "2", "--schedule", "interleaved", "--with", "n_layer=4"),
    **{f"zero{level}": (*GPT2, "dp=2", "--zero", f"{level}", "--micro-batches", "2") for level in (1, 2, 3)},
    "float16": (*GPT2, "dp=2", "--precision", "fp16-mixed", "--optimizer", "sgd"),
    "float8": (*GPT2, "dp=2,tp=2", "--precision", "fp8-mixed", "--recompute", "full"),
    "evaluation": (*GPT2, "tp=2", "--eval"),
    "dynamic": (*GPT2, "dp=2", "--dynamic", "batch=4..16/4"),
    "numbers": (*GPT2[:-1], "--devices", "4,2"),
    "convolutions": ("examples/lenet.py:build", "--mesh", "dp=2,tp=2"),
    "places": VISION,
    "servers": (*DLRM, "--workers", "1:3", "--asynchronous"),
}
LOST = {"attr-defined", "call-arg", "name-defined", "used-before-def", "misc", "method-assign", "import-not-found"}
THERE = "_args_from_interpreter_flags"  # of subprocess, though no stub has it


def plan(folder: Path, name: str) -> None:
    hardware = "h100-80g-sxm" if name == "float8" else "a100-80g-sxm"
    assert main(["plan", *PLANS[name], "--hardware", hardware, "--out", str(folder), "--no-cache"]) == 0


def lost(folder: Path) -> list[str]:
    """What mypy misses in the programs of a package."""
    names = sorted(path for path in map(str, folder.rglob("*.py")) if "devices_" not in path.removeprefix(str(folder)))
    flags = (
        "--check-untyped-defs --follow-imports=skip --ignore-missing-imports --implicit-reexport --cache-dir /dev/null"
    )
    command = [sys.executable, "-m", "mypy", *flags.split(), "--config-file=", *names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode in (0, 1), done.stderr
    errors = re.findall(r"^(.* error: .*\[(.*)\])$", done.stdout, re.MULTILINE)
    return [line for line, kind in errors if kind in LOST and THERE not in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_lost(tmp_path: Path, name: str) -> None:
    plan(tmp_path, name)
    for program in tmp_path.rglob("train.py"):
        assert not lost(program.parent)


@pytest.mark.slow
def test_what_is_lost_is_seen(tmp_path: Path) -> None:
    plan(tmp_path, "tensor")
    path = tmp_path / "runtime" / "nonfinite.py"
    text = path.read_text()
    assert "def words(" in text
    path.write_text(text.replace("def words(self)", "def text(self, more)"))
    assert any('has no attribute "words"' in line for line in lost(tmp_path))
