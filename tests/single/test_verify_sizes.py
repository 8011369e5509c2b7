"""Reduced sizes and shorter meshes: smaller, and split in the same way."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph, Op, Tensor
from autoshard.ir.layout import AxisShard, Layout, LocalSize, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Compute, LocalValue, Program, ProgramParameter
from autoshard.search.fixed_styles import random_plan
from autoshard.verification.coverage import plan_kinds
from autoshard.verification.sizing.reduced_sizes import (
    changed,
    evenness,
    heads_per_device,
    lost_evenness,
    reduced_arguments,
)
from autoshard.verification.sizing.shorter_axes import counterpart
from tests.slow import quick_at

# --- reduced sizes: smaller, and split in the same way ---


MESH = Mesh.parse("dp=2,tp=4")


def test_arguments() -> None:
    planned = {"n_layer": 12, "batch": 2, "name": "x", "flag": True}
    small = reduced_arguments(planned, {"n_layer": 2, "batch": 16, "flag": False}, {"name": "y"})
    assert small == {"n_layer": 2, "batch": 2, "name": "y", "flag": False}
    assert changed(planned, small) == (("flag", "False", "True"), ("n_layer", "2", "12"), ("name", "y", "x"))
    assert changed(planned, planned) == ()


@pytest.mark.parametrize(
    ("size", "words"), [(8, "evenly"), (7, "unevenly"), (5, "down to nothing"), (3, "down to nothing")]
)
def test_evenness(size: int, words: str) -> None:
    assert evenness(LocalSize(size, (AxisShard("tp"),)), MESH) == words


def graph(vocabulary: int, heads: int) -> Graph:
    tensors = (Tensor("w", (vocabulary, 6), "float32", True), Tensor("q", (2, heads, 3, 4), "float32", True))
    op = Op("attention", "aten.scaled_dot_product_attention", ("q", "q", "q"), (), ("a",), "h.0")
    return Graph("g", (*tensors, Tensor("a", (2, heads, 3, 4), "float32", True)), ("q",), (), (), (op,), ("a",), None)


def program(vocabulary: int, heads: int) -> Program:
    def value(name: str, shape: tuple[int, ...], text: str) -> LocalValue:
        layout = Layout.parse(text)
        return LocalValue(name, name, shape, "float32", layout, local_sizes(shape, layout, MESH), True)

    shape = (vocabulary, 6)
    values = (value("w", shape, "R S0"), value("q", (2, heads, 3, 4), "S0 S1"), value("a", (2, heads, 3, 4), "S0 S1"))
    layout = Layout.parse("R S0")
    parameter = ProgramParameter("w", "head.weight", (), shape, "float32", layout, shape, layout, True)
    attention = Compute("attention", "aten.scaled_dot_product_attention", ("q", "q", "q"), (), ("a",), "h.0", "", "b h")
    return Program(
        "g", MESH, values, ("q",), (parameter,), (), (attention,), ("a",), None, (), (), (), "fp32", "adamw", True
    )  # fmt: skip


def lost(full: tuple[int, int], small: tuple[int, int]) -> list[str]:
    return list(lost_evenness(program(*full), graph(*full), program(*small), graph(*small)))


def test_unevenness_must_stay() -> None:
    assert lost((50257, 12), (97, 12)) == []
    (message,) = lost((50257, 12), (96, 12))
    assert message == "head.weight: dim 0 of length 96 is split evenly, planned 50257 is unevenly"
    messages = lost((50257, 12), (97, 2))
    assert len(messages) == 2 and "input 0: dim 1" in messages[0] and "down to nothing" in messages[1]
    assert "result 0 of aten.scaled_dot_product_attention 0 in h.0" in messages[1]


def test_heads_of_a_device() -> None:
    assert heads_per_device(program(97, 12)) == {(3, 12)}


# --- plans for more devices than can run here ---


MLP = f"{Path(__file__).parents[2] / 'examples' / 'mlp.py'}:build"
SIZES = {"batch": 256, "features": 48, "hidden": 96, "outputs": 10}


@cache
def shrunk() -> Graph:
    return capture(MLP, SIZES)


def plan(mesh: str, seed: int = 0) -> Plan:
    return random_plan(PlanningContext(shrunk(), Mesh.parse(mesh), load_hardware("a100-80g-sxm")), seed)


@pytest.mark.parametrize("mesh", quick_at(["dp=4,pp=8,tp=8", "dp=1024", "a=6,b=6,c=6"], 1))
def test_strategies_layouts_and_evenness_are_those_of_the_plan(mesh: str) -> None:
    planned = plan(mesh)
    smaller = counterpart(planned, shrunk(), shrunk(), load_hardware("a100-80g-sxm"), 64)
    assert not smaller.lost
    assert 32 <= smaller.plan.mesh.size <= 64
    assert smaller.plan.mesh.names == planned.mesh.names and min(smaller.plan.mesh.sizes) > 1
    assert [op.strategy for op in smaller.plan.ops] == [op.strategy for op in planned.ops]
    assert [t.layout for t in smaller.plan.parameters] == [t.layout for t in planned.parameters]
    assert plan_kinds(smaller.plan, shrunk()) == plan_kinds(planned, shrunk())


def test_a_mesh_that_fits_stays() -> None:
    planned = plan("dp=4,tp=2")
    smaller = counterpart(planned, shrunk(), shrunk(), load_hardware("a100-80g-sxm"), 64)
    assert (smaller.plan.mesh, smaller.plan.ops, smaller.lost) == (planned.mesh, planned.ops, ())


def test_what_no_shorter_mesh_keeps_is_said() -> None:
    """256 samples over 3 devices are uneven, over 2 they are even."""
    smaller = counterpart(plan("dp=3", seed=1), shrunk(), shrunk(), load_hardware("a100-80g-sxm"), 2)
    assert smaller.plan.mesh.sizes == (2,)
    assert "dim 0 of length 256 is split evenly, planned 256 is unevenly" in smaller.lost[0]


@pytest.mark.slow
def test_the_road_of_a_large_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan --verify` alone does what can be done, and says what that was."""
    words = ["--hardware", "a100-80g-sxm", "--strategy", "random:1", "--out", str(tmp_path / "out"), "--verify"]
    sizes = ["--with", *(f"{name}={value}" for name, value in SIZES.items())]
    assert commands.main(["plan", MLP, "--mesh", "dp=4,cp=4,tp=16", *words, *sizes]) == 0
    printed = capsys.readouterr().out
    assert "verified on dp=4,cp=4,tp=4 (which stands for dp=4,cp=4,tp=16): 64 devices in lock-step" in printed
    assert "not verified: 16 devices along tp: 4 ran" in printed
    assert "the package itself, the same plan at the full number of devices, was not run" in printed


@pytest.mark.slow
def test_64_devices_run_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    command = ["plan", MLP, "--mesh", "dp=8,tp=8", "--hardware", "a100-80g-sxm", "--strategy", "random:2"]
    assert commands.main([*command, "--out", out, "--with", *(f"{name}={value}" for name, value in SIZES.items())]) == 0
    assert commands.main(["verify", out]) == 0
    printed = capsys.readouterr().out
    assert "verified on dp=8,tp=8: 64 devices in lock-step" in printed and "not verified" not in printed
