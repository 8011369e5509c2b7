"""Pages that run: the API's examples, the guide for contributors, the rules of the table."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit.expressions import ExpressionWriter
from autoshard.graph_capture.capture import capture_model
from autoshard.ir.mesh import Mesh
from autoshard.rules import OPERATORS
from autoshard.rules.algebra.operator_record import Operator
from autoshard.rules.algebra.saved_for_backward import keeps
from autoshard.rules.cases import ALL
from autoshard.rules.proof.case_text import case, floats
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.rule_page import page, with_tail
from autoshard.verification.rule_table import prove_case
from tests import launched

# --- the examples of docs/api.md run, each by itself, as they stand there ---


ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


SCRIPTS = [(ROOT / "examples" / f"{name}.py").read_text("utf-8") for name in ("shard_function", "operator_strategies")]


@pytest.mark.parametrize("text", [*EXAMPLES, *SCRIPTS], ids=range(len(EXAMPLES) + len(SCRIPTS)))
def test_example(text: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = launched.run(["example.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


# --- docs/rules.md says what the table says ---


RULES_PAGE_PAGE = Path(__file__).resolve().parents[2] / "docs" / "rules.md"


def test_the_page_is_up_to_date() -> None:
    old = RULES_PAGE_PAGE.read_text(encoding="utf-8")
    assert old == with_tail(old, page()), "python -m autoshard.verification.rule_page --write"


def test_every_operator_is_on_the_page() -> None:
    text = page()
    ruled = {target for target, known in OPERATORS.items() if known.rule is not None}
    assert not {target for target in ruled if f"`{target.removeprefix('aten.')}`" not in text}
    assert "`... m, n m, +n? -> ... n` | sum `m` |" in text


def test_what_others_wrote_below_the_table_stays() -> None:
    assert with_tail(page() + "\n## More\n", page()).endswith("\n\n## More\n")


# --- the guide is followed: its blocks add an operator to the table, which proves it and plans with it ---


CONTRIBUTING_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "contributing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", CONTRIBUTING_PAGE, re.DOTALL | re.MULTILINE)
FILES = re.findall(r"`((?:autoshard|benchmarks|hardware_profiles|costmodels|tests)/[\w/.]*)`", CONTRIBUTING_PAGE)
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
    assert ExpressionWriter(str, "device").spell(TARGET, ("x", "y"), {}) == "torch.hypot(x, y)"


def test_the_files_are_there() -> None:
    root = Path(__file__).resolve().parents[2]
    assert FILES and not [name for name in FILES if not (root / name).exists()]
    assert ALL  # the list that the guide extends
