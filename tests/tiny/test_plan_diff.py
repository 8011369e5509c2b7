"""What `autoshard diff` calls decisions, and what it says of plans of different models and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.graph_capture.training.precision import apply_precision
from autoshard.ir import graph_json
from tests.graphs import mlp_graph
from tests.tiny.test_search_verbs import graph_file, package, planned, run, words

__all__ = ["graph_file", "package"]  # fixtures


@pytest.mark.slow
def test_casts_of_one_module_have_names_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bf16.graph.json"
    path.write_text(graph_json.dumps(apply_precision(mlp_graph(1), "bf16-mixed")), encoding="utf-8")
    for style in ("dp", "megatron"):
        planned(words(path, tmp_path / style, "--strategy", style), capsys)
    diff = json.loads(run(["diff", str(tmp_path / "dp"), str(tmp_path / "megatron"), "--json"], capsys)[1])
    names = [change["name"] for change in diff["changes"]]
    assert len(names) == len({*names}) and any(" to (" in name for name in names)


def test_diff_of_other_models(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.graph.json"
    path.write_text(graph_json.dumps(mlp_graph(4, 256, 2048)), encoding="utf-8")
    assert commands.main(words(path, tmp_path / "out", mesh="tp=4")) == 0
    capsys.readouterr()
    code, out, _ = run(["diff", str(package), str(tmp_path / "out")], capsys)
    assert code == 0
    assert "the graphs differ: 4 decisions are in one plan only" in out
    assert "tp=4" in out


def test_diff_names_precision_purpose_and_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are options of one model: its plans differ in casts, in their backward, or in the step alone."""
    for name, precision in (("fp32", "fp32"), ("bf16", "bf16-mixed")):
        path = tmp_path / f"{name}.graph.json"
        path.write_text(graph_json.dumps(apply_precision(mlp_graph(1), precision)), encoding="utf-8")
        more = ["--zero", "1", "--strategy", "dp"] if precision == "fp32" else []
        planned(words(path, tmp_path / name, *more), capsys)
    out = run(["diff", str(tmp_path / "fp32"), str(tmp_path / "bf16")], capsys)[1]
    assert "the models differ" not in out
    rows = [line.split() for line in out.splitlines()]
    assert ["run", "fp32,", "adamw", "bf16-mixed,", "adamw"] in rows
    assert ["step", "1", "micro-batch,", "ZeRO", "1", "1", "micro-batch"] in rows
