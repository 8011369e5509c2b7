"""Plans for more devices than can run here: as many ranks as in lock-step, or a shorter mesh that is split alike."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.search.fixed_styles import random_plan
from autoshard.verification.coverage import plan_kinds
from autoshard.verification.sizing.shorter_axes import counterpart

MLP = f"{Path(__file__).parents[2] / 'examples' / 'mlp.py'}:build"
SIZES = {"batch": 256, "features": 48, "hidden": 96, "outputs": 10}


@cache
def graph() -> Graph:
    return capture(MLP, SIZES)


def plan(mesh: str, seed: int = 0) -> Plan:
    return random_plan(graph(), Mesh.parse(mesh), load_hardware("a100-80g-sxm"), seed)


@pytest.mark.parametrize("mesh", ["dp=4,pp=8,tp=8", "dp=1024", "a=6,b=6,c=6"])
def test_strategies_layouts_and_evenness_are_those_of_the_plan(mesh: str) -> None:
    planned = plan(mesh)
    found = counterpart(planned, graph(), graph(), load_hardware("a100-80g-sxm"), 64)
    assert not found.lost
    assert 32 <= found.plan.mesh.size <= 64
    assert found.plan.mesh.names == planned.mesh.names and min(found.plan.mesh.sizes) > 1
    assert [op.strategy for op in found.plan.ops] == [op.strategy for op in planned.ops]
    assert [t.layout for t in found.plan.parameters] == [t.layout for t in planned.parameters]
    assert plan_kinds(found.plan, graph()) == plan_kinds(planned, graph())


def test_a_mesh_that_fits_stays() -> None:
    planned = plan("dp=4,tp=2")
    found = counterpart(planned, graph(), graph(), load_hardware("a100-80g-sxm"), 64)
    assert (found.plan.mesh, found.plan.ops, found.lost) == (planned.mesh, planned.ops, ())


def test_what_no_shorter_mesh_keeps_is_said() -> None:
    """256 samples over 3 devices are uneven, over 2 they are even."""
    found = counterpart(plan("dp=3", seed=1), graph(), graph(), load_hardware("a100-80g-sxm"), 2)
    assert found.plan.mesh.sizes == (2,)
    assert "dim 0 of length 256 is split evenly, planned 256 is unevenly" in found.lost[0]


def test_the_road_of_a_large_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan --verify` alone does what can be done, and says what that was."""
    words = ["--hardware", "a100-80g-sxm", "--strategy", "random:1", "--out", str(tmp_path / "out"), "--verify"]
    sizes = ["--with", *(f"{name}={value}" for name, value in SIZES.items())]
    assert commands.main(["plan", MLP, "--mesh", "dp=4,cp=4,tp=16", *words, *sizes]) == 0
    printed = capsys.readouterr().out
    assert "verified on dp=4,cp=4,tp=4 (which stands for dp=4,cp=4,tp=16): 64 devices in lock-step" in printed
    assert "not verified: 16 devices along tp: 4 ran" in printed
    assert "emits at the full number of devices, which did not run" in printed


@pytest.mark.slow
def test_64_devices_run_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    command = ["plan", MLP, "--mesh", "dp=8,tp=8", "--hardware", "a100-80g-sxm", "--strategy", "random:2"]
    assert commands.main([*command, "--out", out, "--with", *(f"{name}={value}" for name, value in SIZES.items())]) == 0
    assert commands.main(["verify", out]) == 0
    printed = capsys.readouterr().out
    assert "verified on dp=8,tp=8: 64 devices in lock-step" in printed and "not verified" not in printed
