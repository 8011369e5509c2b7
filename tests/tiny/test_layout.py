"""Layouts: notation, the chunk rule, index sets and normal forms, against definitions written out by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.layout import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL,
    AxisShard,
    Layout,
    LocalSize,
    Shard,
    chunk_bounds,
    largest_shape,
    local_shape,
    normalise,
)
from autoshard.ir.mesh import Mesh

MESHES = [Mesh.parse(text) for text in ("dp=2", "tp=3", "dp=2,tp=2", "dp=2,tp=4", "dp=2,sp=2,tp=2", "dp=3,tp=2")]
PLACEMENTS = st.one_of(
    st.sampled_from([REPLICATE, REPLICATE_PARTIAL, PARTIAL]),
    st.builds(Shard, st.integers(0, 2), st.integers(1, 4), st.integers(1, 3)),
)


def held(local: LocalSize, mesh: Mesh, rank: int) -> list[int]:
    return [i for start, stop in local.intervals(mesh, mesh.coordinates(rank)) for i in range(start, stop)]


@given(st.lists(PLACEMENTS, min_size=1, max_size=4))
def test_a_layout_prints_and_parses_back(placements):
    layout = Layout(tuple(placements))
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(("size", "parts"), [(12, 4), (10, 4), (3, 4), (50257, 8), (0, 2), (1, 1)])
def test_chunk_bounds_tile_the_dim_and_give_the_first_ranks_most(size, parts):
    bounds = [chunk_bounds(size, parts, index) for index in range(parts)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in bounds]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == -(-size // parts)


@given(st.lists(st.integers(1, 9), min_size=4, max_size=4).map(tuple))
def test_parts_of_given_lengths(lengths):
    """Every device holds its own part: as bounds, as intervals, as lengths of all devices at once, and at most the
    largest."""
    mesh, size = Mesh.parse("dp=2,tp=4"), sum(lengths)
    layout = Layout((REPLICATE, Shard(0, 1, lengths)))
    assert Layout.parse(str(layout)) == layout and normalise(layout, (size,), mesh) == layout
    local = LocalSize(size, (AxisShard("tp", 1, lengths),))
    for rank in range(mesh.size):
        part = rank % 4
        start = sum(lengths[:part])
        assert held(local, mesh, rank) == list(range(start, start + lengths[part]))
        assert local_shape((size, 3), layout, mesh, mesh.coordinates(rank)) == (lengths[part], 3)
    assert largest_shape((size, 3), layout, mesh) == (max(lengths), 3)
    assert local.is_even(mesh) == (len(set(lengths)) == 1)


def test_units_are_never_cut():
    assert [chunk_bounds(12 * 64, 8, i, 64) for i in (0, 5, 6, 7)] == [(0, 128), (640, 768), (768, 768), (768, 768)]


def test_three_blocks_hold_a_slice_of_each_of_q_k_and_v():
    local = LocalSize(24, (AxisShard("tp", 3),))
    mesh = Mesh.parse("tp=2")
    assert local.intervals(mesh, (0,)) == [(0, 4), (8, 12), (16, 20)]
    assert local.intervals(mesh, (1,)) == [(4, 8), (12, 16), (20, 24)]


@given(st.sampled_from(MESHES), st.data())
def test_every_index_is_held_once_over_the_axes_that_cut_it(mesh, data):
    blocks, unit, inner = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    shards = tuple(AxisShard(name, blocks, unit) for name in mesh.names if data.draw(st.booleans()))
    local = LocalSize(blocks * unit * inner, shards)
    copies = mesh.size
    for shard in shards:
        copies //= mesh.axis_size(shard.axis)
    everything = sorted(i for rank in range(mesh.size) for i in held(local, mesh, rank))
    assert everything == sorted(list(range(local.size)) * copies)
    assert max(len(held(local, mesh, rank)) for rank in range(mesh.size)) == local.largest(mesh)
    lengths = {len(held(local, mesh, rank)) for rank in range(mesh.size)}
    assert lengths == {local.evaluate(mesh, mesh.coordinates(rank)) for rank in range(mesh.size)}
    assert local.is_even(mesh) == (len(lengths) == 1)


@given(st.sampled_from(MESHES), st.data())
def test_normalise_keeps_what_every_device_holds_and_is_a_normal_form(mesh, data):
    shape = (12, 24, 5)
    placements = []
    for _ in mesh.axes:
        dim = data.draw(st.integers(0, 1))
        blocks, unit = data.draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (3, 2), (2, 3)]))
        placements.append(data.draw(st.sampled_from([REPLICATE, PARTIAL, Shard(dim, blocks, unit)])))
    layout = Layout(tuple(placements))
    normal = normalise(layout, shape, mesh)
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        assert local_shape(shape, layout, mesh, at) == local_shape(shape, normal, mesh, at)
        assert all(
            a >= b
            for a, b in zip(largest_shape(shape, layout, mesh), local_shape(shape, layout, mesh, at), strict=True)
        )
    assert normalise(normal, shape, mesh) == normal


def test_normal_forms():
    mesh = Mesh.parse("dp=2,tp=4")
    assert normalise(Layout.parse("R S1*64"), (4, 768), mesh) == Layout.parse("R S1")
    assert normalise(Layout.parse("R S1/3*64"), (4, 2304), mesh) == Layout.parse("R S1/3")
    assert normalise(Layout.parse("R+ P"), (4,), mesh, differentiable=False) == Layout.parse("R P")
    assert normalise(Layout.parse("S0 S0/4"), (8,), Mesh.parse("dp=1,tp=2")) == Layout.parse("R S0/4")
    assert normalise(Layout.parse("S0 S0/2"), (8,), Mesh.parse("dp=2,tp=2")) == Layout.parse("S0 S0")
