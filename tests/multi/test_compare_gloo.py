"""`autoshard compare` with a real trace: two processes of gloo train an emitted package under torch's profiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cli.commands import main
from tests.hangs import HANGS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_run_is_laid_beside_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the plan multiplies and sums is found in the trace under the same names, forward and backward."""
    package, trace, script = tmp_path / "package", tmp_path / "trace.json", ROOT / "examples" / "profiled.py"
    words = [f"{ROOT}/examples/mlp.py:build", "--mesh", "dp=2", "--hardware", "cpu-local", "--out", str(package)]
    assert main(["plan", *words, "--strategy", "dp"]) == 0
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = [*started, str(trace), str(package / "train.py"), "--backend", "gloo", "--steps", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(run, check=True, timeout=HANGS, env=environment, capture_output=True)
    capsys.readouterr()
    assert main(["compare", str(package), str(trace), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == 3
    both = {row["name"] for row in report["operators"] if row["predicted_seconds"] and row["measured_seconds"]}
    assert {"linear, forward", "linear, backward", "optimizer"} <= both
    assert any(row["predicted_seconds"] and row["measured_seconds"] for row in report["collectives"])
    assert main(["compare", str(package), str(trace)]) == 0
    assert "Most of the difference" in capsys.readouterr().out
    assert main(["compare", str(package), str(trace), "--out", str(tmp_path / "mine.toml")]) == 0
    assert "calibrated by this run" in capsys.readouterr().out
    replan = [*words[:4], str(tmp_path / "mine.toml"), "--out", str(tmp_path / "again")]
    assert main(["plan", *replan, "--strategy", "dp"]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "again"), str(trace), "--json"]) == 0
    step, before = json.loads(capsys.readouterr().out)["step"], report["step"]
    off = [abs(row["predicted_seconds"] / row["measured_seconds"] - 1) for row in (before, step)]
    assert off[1] < off[0] and off[1] < 0.1
