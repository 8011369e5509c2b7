"""The same model planned by processes with other hash seeds gives the same package, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hangs import HANGS

UNLIKE = {"search.log", "manifest.json"}  # how long the search took, and the hash of that


def planned(folder: Path, seed: int) -> dict[str, bytes]:
    sizes = ["--with", "n_layer=2", "n_embd=48", "sequence=8", "vocabulary=29", "dropout=0.1"]
    options = ["--mesh", "dp=2,tp=2", "--hardware", "cpu-local", "--out", str(folder)]
    command = [sys.executable, "-m", "autoshard", "plan", "examples/gpt2.py:build", *sizes, *options]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=HANGS)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in UNLIKE]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_packages_are_equal_across_processes_and_hash_seeds(tmp_path: Path) -> None:
    first, second = planned(tmp_path / "one", 0), planned(tmp_path / "two", 4242)
    assert {"plan.json", "graph.json", "model_parallel.py", "report.html"} <= first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
