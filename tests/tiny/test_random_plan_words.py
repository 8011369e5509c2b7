"""What is told of a random plan: its simulated step, and what each of its choices costs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware
from autoshard.ir import graph_json
from autoshard.ir.mesh import Mesh
from autoshard.replay import reevaluate
from autoshard.search.fixed_styles import random_plan
from autoshard.text import plan_diff
from tests.graphs import mlp_graph


def test_a_random_plan_tells_the_step_that_it_was_simulated_to_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = tmp_path / "mlp.graph.json"
    graph.write_text(graph_json.dumps(mlp_graph(3, 64, 128)), encoding="utf-8")
    command = ["plan", str(graph), "--mesh", "dp=2,tp=2", "--hardware", "a100-80g-sxm", "--strategy", "random:1"]
    code = commands.main([*command, "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    step = re.search(r"predicted step +(\S+ \S+)", out)
    assert code == 0 and step is not None and f"simulated step {step[1]}, no lower bound" in " ".join(out.split())


def test_costs_of_a_random_plans_choices_are_told_and_add_up() -> None:
    graph, hardware, mesh = mlp_graph(3, 64, 128), load_hardware("a100-80g-sxm"), Mesh.parse("dp=2,tp=2")
    plans = [random_plan(graph, mesh, hardware, seed) for seed in (0, 1)]
    for plan in plans:
        each = [decided.parts for _, decided in reevaluate.decisions(plan)]
        total = sum(part.compute_seconds + part.communication_seconds for part in each) + plan.search.outputs_seconds
        assert total == pytest.approx(plan.certificate.objective_seconds, rel=1e-6)
    found = plan_diff.diff(plans[0], graph, plans[1], graph)
    assert any(change.seconds for change in found.changes)
