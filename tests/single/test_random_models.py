"""Random models under random plans, by a comparison that shares nothing with `autoshard verify`; 2,000 of them:
`python -m benchmarks.fuzz`. The comparison itself must fail on what is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import autoshard.emit.runtime as runtime
from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import random_plan
from benchmarks.fuzz import RIGHT, run_seed
from tests import differential
from tests.differential import Mismatch, compare, held, on_devices
from tests.random_models import build
from tests.slow import quick_at, slow

SPEC = "tests/random_models.py:build"


@pytest.mark.parametrize("seed", quick_at(range(10_000, 10_012), 2))
def test_random_model(seed: int) -> None:
    row = run_seed(seed)
    assert (row.end, row.reason) == (RIGHT, "")


@pytest.mark.parametrize("fault", [slow((".tanh()", ".sin()")), (".sum()", ".mean()")])
def test_a_fault_in_the_source_is_a_mismatch(fault: tuple[str, str]) -> None:
    graph = capture(SPEC, {"seed": 3})
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm")), 3)
    program = lower(plan, graph)
    files = dict(emit(program, plan, graph))
    before = files["model_parallel.py"]
    files["model_parallel.py"] = before.replace(*fault)
    assert files["model_parallel.py"] != before
    model, inputs = build(3)
    with pytest.raises(Mismatch):
        compare(model, inputs, program, files)


def test_ranks_that_issue_different_collectives_are_a_mismatch() -> None:
    def work(mesh: SimpleNamespace) -> None:
        x = torch.ones(2)
        if mesh.rank == 1:
            mesh["tp"].transport.all_gather(x, [2, 2])
        else:
            mesh["tp"].transport.all_reduce(x)

    with pytest.raises(Mismatch, match="different collectives"):
        on_devices(runtime, {"tp": 2}, work)


def test_a_rank_that_leaves_a_collective_out_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differential, "HANGS", 0.2)
    with pytest.raises(Mismatch, match="waited in vain"):
        on_devices(runtime, {"tp": 2}, lambda mesh: mesh.rank or mesh["tp"].transport.barrier())


def test_what_a_device_holds() -> None:
    axes = {"dp": 2, "tp": 2}
    assert [held(10, 0, "S0 S0", axes, rank) for rank in range(4)] == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    assert [held(8, 0, "R S0/2", axes, rank) for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [held(9, 0, "S0*3 R", axes, rank) for rank in (0, 2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert held(4, 1, "S0 R", axes, 3) == [0, 1, 2, 3]
