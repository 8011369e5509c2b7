"""Meshes: parsing, names of axes that mean something else."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.api.settings import read_mesh
from autoshard.cli import commands
from autoshard.constraints.axis_names import MEANT, instead
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh

# --- meshes: notation, ranks, and errors that name the value ---


NAMES = st.lists(st.sampled_from(["dp", "tp", "sp", "x1"]), min_size=1, max_size=4, unique=True)


@given(NAMES, st.data())
def test_a_mesh_prints_and_parses_back(names, data):
    mesh = Mesh(tuple((name, data.draw(st.integers(1, 64))) for name in names))
    assert Mesh.parse(str(mesh)) == mesh


def test_ranks_are_row_major():
    mesh = Mesh.parse("dp=2,sp=3,tp=2")
    expected = list(itertools.product(range(2), range(3), range(2)))
    assert [mesh.coordinates(rank) for rank in range(mesh.size)] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp2", "expected name=size, got 'dp2'"),
        ("dp=0", "dp has size 0"),
        ("dp=2,dp=2", "dp is named twice"),
        ("", "expected name=size"),
    ],
)
def test_a_bad_mesh_is_a_usage_error(text, message):
    with pytest.raises(UsageError, match=message):
        Mesh.parse(text)


def test_an_unknown_axis_lists_the_axes():
    with pytest.raises(UsageError, match="unknown mesh axis 'pp': the mesh dp=2,tp=2 has dp, tp"):
        Mesh.parse("dp=2,tp=2").index("pp")


# --- names of axes that mean something else ---


TABLE = [
    ("dp=4,pp=2", "--mesh dp=4 --stages 2 --micro-batches 2"),
    ("PP_SIZE=2,tp=2", "--mesh tp=2 --stages 2 --micro-batches 2"),
    ("pipeline_parallel=2", "--mesh dp=1 --stages 2 --micro-batches 2"),
    ("stage=2,dp=2", "--mesh dp=2 --stages 2 --micro-batches 2"),
    ("vpp=2,pp=2,dp=2", "--mesh dp=2 --stages 2 --virtual-stages 2 --schedule interleaved --micro-batches 2"),
    ("ga=4,dp=2", "--mesh dp=2 --micro-batches 4"),
    ("fsdp=8", "--mesh dp=8 --strategy fsdp"),
    ("dp_replicate=2,dp_shard=4", "--mesh dp=2,inner=4 --strategy hsdp"),
    ("dp=2,fsdp=4", "--mesh dp=2,inner=4 --strategy hsdp"),
    ("fsdp=4,tp=2", "--mesh dp=4,tp=2 --zero 3"),
    ("fsdp=2,pp=2", "--mesh dp=2 --stages 2 --micro-batches 2 --zero 3"),
    ("zero2=2", "--mesh dp=2 --zero 2"),
    ("zero_1=4,tp=2", "--mesh dp=4,tp=2 --zero 1"),
    ("dp=2,sp=4", "--mesh dp=2,cp=4"),
    ("sp=2,cp=2", "--mesh cp=4"),
]
PLAIN = ["dp=2,tp=2", "cp=2,ep=2", "outer=2,middle=2,inner=3", "data=2,model=2", "node=2,gpu=4", "a=2", "sequence=2"]
MODEL = str(Path(__file__).parents[2] / "examples" / "mlp.py") + ":build"


@pytest.mark.parametrize(("mesh", "hint"), TABLE, ids=[mesh for mesh, _ in TABLE])
def test_what_a_name_means(mesh: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["plan", MODEL, "--mesh", mesh, "--hardware", "cpu-local"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"  try: {hint}"
    assert commands.main(["prove", "relu", "--mesh", mesh]) == 2
    with pytest.raises(UsageError, match="axis"):
        read_mesh(dict(Mesh.parse(mesh).axes))
    with pytest.raises(UsageError, match="axis"):
        read_mesh(Mesh.parse(mesh))


@pytest.mark.parametrize("mesh", PLAIN)
def test_other_names_are_the_users(mesh: str) -> None:
    assert read_mesh(mesh) == Mesh.parse(mesh)


@pytest.mark.parametrize("name", sorted(MEANT))
@pytest.mark.parametrize("beside", ["", "dp=2,", "tp=2,", "dp=2,tp=2,"])
def test_what_is_proposed_is_accepted_and_has_as_many_devices(name: str, beside: str) -> None:
    """Whatever stands beside it; micro-batches take no devices."""
    mesh = Mesh.parse(f"{beside}{name}=2")
    words = shlex.split(instead(mesh))
    options = dict(zip(words[::2], words[1::2], strict=True))
    proposed = read_mesh(options["--mesh"])
    assert proposed is not None
    whole = proposed.size * int(options.get("--stages", "1"))
    timed = MEANT[name] in ("micro-batches", "parts of stages")
    assert whole == mesh.size if not timed else whole >= mesh.size // 2
