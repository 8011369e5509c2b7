"""The guide is followed: its blocks add an operator to the table, which proves it and plans with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit.spelling import Speller
from autoshard.graph_capture.capture import capture_model
from autoshard.ir.mesh import Mesh
from autoshard.rules import OPERATORS
from autoshard.rules.algebra.operator_record import Operator
from autoshard.rules.algebra.saved_for_backward import keeps
from autoshard.rules.cases import ALL
from autoshard.rules.proof.case_words import case, floats
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.rule_table import prove_case

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "contributing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FILES = re.findall(r"`((?:autoshard|benchmarks|hardware_profiles|costmodels|tests)/[\w/.]*)`", PAGE)
TARGET = "aten.hypot"


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        return torch.hypot(self.a(x), self.b(x)).mean()


def test_an_operator_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TARGET not in OPERATORS, "the guide needs an operator that the table lacks"
    records, cases = dict(OPERATORS), list[object]()
    for block in BLOCKS:
        words = {"Operator": Operator, "keeps": keeps, "case": case, "floats": floats}
        exec(block, {"OPERATORS": records, "ALL": cases, **words})
    monkeypatch.setitem(OPERATORS, TARGET, records[TARGET])
    mesh = Mesh.parse("dp=2,tp=3")
    verdicts = [verdict for each in cases for verdict in prove_case(each, mesh)]
    assert len(verdicts) > 8
    assert not [verdict for verdict in verdicts if verdict.failure]
    graph = capture_model(Distances(), (torch.randn(48, 64),))
    plan = search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse("dp=4")))
    strategies = {op.op: op.strategy for op in plan.ops}
    (name,) = (op.name for op in graph.ops if op.target == TARGET)
    assert strategies[name] not in ("", "repeat", "*")
    assert graph.by_op[name].saved.results == (0,)
    assert Speller(str, "device").spell(TARGET, ("x", "y"), {}) == "torch.hypot(x, y)"


def test_the_files_are_there() -> None:
    root = Path(__file__).resolve().parents[2]
    assert FILES and not [name for name in FILES if not (root / name).exists()]
    assert ALL  # the list that the guide extends
