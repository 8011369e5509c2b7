"""The stages of a plan in its printed summary."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cli.commands import main
from autoshard.ir.graph_json import dumps
from tests.graphs import mlp_graph


def test_the_printed_plan_lists_its_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "model.graph.json"
    saved.write_text(dumps(mlp_graph(2, 64, 256)), encoding="utf-8")
    asked = [
        "plan",
        str(saved),
        "--mesh",
        "dp=2",
        "--hardware",
        "a100-80g-sxm",
        "--stages",
        "2",
        "--micro-batches",
        "4",
    ]
    assert main([*asked, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    rows = told[told.index("stage  has") :].splitlines()
    assert "a backward" in rows[0] and any(row.startswith("0      the start") for row in rows)
    assert any(row.startswith("1 ") for row in rows)
    assert told.index("bubble") > told.index("stage  has") and "one stage: all below" not in told
