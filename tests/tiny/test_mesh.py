"""Meshes: notation, ranks, and errors that name the value."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh

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
