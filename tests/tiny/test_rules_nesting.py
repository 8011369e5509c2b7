"""Nested cuts against sets of indices enumerated one by one."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import assume, given
from hypothesis import strategies as st

from autoshard.ir.intervals import Cut, runs
from autoshard.ir.layout import AxisShard, LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.nesting import dim_cut, factor_problem, product_problem

PARTS = st.sampled_from([2, 3])


def indices(size: int, cuts: tuple[Cut, ...]) -> list[list[int]]:
    """By the definition: what `LocalSize.intervals` gives for every device."""
    mesh = Mesh(tuple((f"a{index}", parts) for index, (parts, _, _) in enumerate(cuts)))
    local = LocalSize(size, tuple(AxisShard(f"a{index}", *cut[1:]) for index, cut in enumerate(cuts)))
    held = (local.intervals(mesh, mesh.coordinates(rank)) for rank in range(mesh.size))
    return [[i for start, stop in intervals for i in range(start, stop)] for intervals in held]


@given(
    st.sampled_from([0, 1, 7, 24, 36, 48]),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3]), st.integers(1, 3)), max_size=3),
)
def test_runs_are_the_intervals_of_every_device(size: int, cuts: list[Cut]) -> None:
    assume(all(size >= blocks or not size for _, blocks, _ in cuts))
    actual, expected = runs(size, tuple(cuts)), indices(size, tuple(cuts))
    held: list[list[int]] = [[] for _ in expected]
    for start, stop, rank in zip(actual.start, actual.stop, actual.rank, strict=True):
        held[rank].extend(range(start, stop))
    assert held == expected
    merged = sum(1 for shard in expected for i in shard if i - 1 not in shard)
    assert len(actual.start) == merged
    assert actual.lengths.tolist() == list(map(len, expected))
    assert actual.some_empty == (not all(expected))
    assert actual.owners().tolist() == [next(r for r, shard in enumerate(expected) if i in shard) for i in range(size)]


@given(st.data())
def test_a_cut_of_a_factor_is_the_same_cut_of_a_product(data: st.DataObject) -> None:
    """One factor on any axes: the product dim holds exactly all of the other parts times what the factor holds."""
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    part = data.draw(st.integers(0, len(sizes) - 1))
    size = data.draw(st.sampled_from([4, 6, 8, 12]))
    sizes = (*sizes[:part], size, *sizes[part + 1 :])
    blocks = data.draw(st.sampled_from([k for k in (1, 2, 3, 4) if size % k == 0]))
    unit = data.draw(st.sampled_from([u for u in (1, 2, 3) if (size // blocks) % u == 0]))
    cuts = tuple((parts, blocks, unit) for parts in data.draw(st.lists(PARTS, min_size=1, max_size=2)))
    assume(not factor_problem(size, cuts, True))
    whole = tuple(dim_cut(sizes, part, cut) for cut in cuts)
    for shard, got in zip(indices(size, cuts), indices(prod(sizes), whole), strict=True):
        ranges = [shard if index == part else range(n) for index, n in enumerate(sizes)]
        assert got == sorted(_flat(point, sizes) for point in product(*ranges))


@given(
    st.lists(st.tuples(st.integers(0, 2), PARTS, st.sampled_from([1, 2]), st.integers(1, 2)), min_size=2, max_size=3),
    st.tuples(*[st.integers(2, 4)] * 3),
)
def test_a_product_of_cut_factors_is_exact_or_refused(
    drawn: list[tuple[int, int, int, int]], sizes: tuple[int, int, int]
) -> None:
    """With blocks and units, uneven shards and empty ones."""
    cuts = tuple((part, (parts, blocks, unit)) for part, parts, blocks, unit in drawn)
    axes = [(part, parts) for part, parts, _, _ in drawn]
    chains = [tuple(cut for at, cut in cuts if at == part) for part in range(3)]
    assume(not any(factor_problem(size, chain, True) for size, chain in zip(sizes, chains, strict=True)))
    refused = product_problem(sizes, cuts)
    if refused:
        return
    whole = indices(prod(sizes), tuple(dim_cut(sizes, part, cut) for part, cut in cuts))
    for rank, point in enumerate(product(*(range(parts) for _, parts in axes))):
        ranges = []
        for part in range(3):
            place = 0
            for (at, parts), coordinate in zip(axes, point, strict=True):
                place = place * parts + coordinate if at == part else place
            ranges.append(indices(sizes[part], chains[part])[place])
        assert whole[rank] == sorted(_flat(entry, sizes) for entry in product(*ranges))


def _flat(point: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    result = 0
    for coordinate, size in zip(point, sizes, strict=True):
        result = result * size + coordinate
    return result


def test_outer_factor_on_the_outer_axis_only() -> None:
    """(b s): b on the outer axis and s on the inner is a layout; the other order is none."""
    assert not product_problem((4, 6), ((0, (2, 1, 1)), (1, (2, 1, 1))))
    assert "don't nest" in product_problem((4, 6), ((1, (2, 1, 1)), (0, (2, 1, 1))))


def test_blocks_nest_in_an_outer_axis_that_leaves_whole_blocks() -> None:
    assert not factor_problem(24, ((2, 1, 1), (3, 4, 1)), False)
    assert "whole blocks" in factor_problem(24, ((2, 1, 1), (2, 3, 1)), False)
    assert "don't nest" in factor_problem(24, ((2, 4, 1), (2, 1, 1)), False)
    assert not factor_problem(24, ((2, 3, 2), (2, 3, 2)), False)


def test_empty_shards() -> None:
    """12 heads over 8 devices are two each on six devices; over 2 x 2 x 2 they are 2 or 1 on all."""
    assert "nothing" in factor_problem(768, ((8, 1, 64),), False)
    assert not factor_problem(768, ((8, 1, 64),), True)
    assert not factor_problem(768, ((2, 1, 64),) * 3, False)
