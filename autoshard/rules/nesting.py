"""Several mesh axes on one factor, or on several factors of one dim: what is held, and what can't be.

A cut is (parts, blocks, unit): an axis of `parts` devices cuts, in each of `blocks` global blocks, in multiples of
`unit`. Cuts stand in mesh order. All is decided on `LocalSize.intervals`, the definition of what a device holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

from autoshard.layout import AxisShard, LocalSize
from autoshard.mesh import Mesh

Cut = tuple[int, int, int]
Intervals = tuple[tuple[int, int], ...]


@cache
def held(size: int, cuts: tuple[Cut, ...]) -> tuple[Intervals, ...]:
    """The intervals that each device holds, devices row-major over the cuts."""
    mesh = Mesh(tuple((f"a{index}", parts) for index, (parts, _, _) in enumerate(cuts)))
    shards = tuple(AxisShard(f"a{index}", blocks, unit) for index, (_, blocks, unit) in enumerate(cuts))
    local = LocalSize(size, shards)
    return tuple(tuple(local.intervals(mesh, mesh.coordinates(rank))) for rank in range(mesh.size))


@cache
def factor_problem(size: int, cuts: tuple[Cut, ...], may_be_empty: bool) -> str:
    """Why these cuts of a factor can't be ("" = they can)."""
    for _, blocks, unit in cuts:
        if size % blocks or (size // blocks) % unit:
            return f"{blocks} blocks in units of {unit} don't divide {size}"
    reason = nesting_problem(size, cuts)
    if reason:
        return reason
    if not may_be_empty and not all(held(size, cuts)):
        parts = " x ".join(str(parts) for parts, _, _ in cuts)
        _, blocks, unit = cuts[-1]
        return f"some device would hold nothing: {size // blocks // unit} units over {parts} devices"
    return ""


@cache
def nesting_problem(size: int, cuts: tuple[Cut, ...]) -> str:
    """Why the cuts don't nest: blocks must not decrease, and a finer axis needs whole blocks left to it."""
    for index in range(1, len(cuts)):
        (_, outer, outer_unit), (_, inner, inner_unit) = cuts[index - 1], cuts[index]
        if (outer, outer_unit) == (inner, inner_unit):
            continue
        if inner <= outer:
            return f"{inner} blocks in units of {inner_unit} don't nest in {outer} blocks in units of {outer_unit}"
        block = size // inner
        if any(edge % block for runs in held(size, cuts[:index]) for run in runs for edge in run):
            return f"the outer axes don't leave whole blocks of {block}"
    return ""


@cache
def product_problem(sizes: tuple[int, ...], cuts: tuple[tuple[int, Cut], ...]) -> str:
    """Why a dim (a product of parts of `sizes`) can't be cut by axes on several parts; `cuts` are (part, its cut).

    What the dim's own cuts hold must be exactly the product of what the parts hold.
    """
    size = _product(sizes)
    whole = tuple(dim_cut(sizes, part, cut) for part, cut in cuts)
    reason = nesting_problem(size, whole)
    if reason:
        return reason
    own = [tuple(cut for at, cut in cuts if at == part) for part in range(len(sizes))]
    places = [[index for index, (at, _) in enumerate(cuts) if at == part] for part in range(len(sizes))]
    for rank, coordinates in enumerate(product(*(range(cut[0]) for _, cut in cuts))):
        parts = [
            held(sizes[part], own[part])[_rank([coordinates[i] for i in places[part]], own[part])]
            for part in range(len(sizes))
        ]
        if tuple(_product_intervals(sizes, parts)) != held(size, whole)[rank]:
            return "the axes cut the factors of one dim in an order that no layout states"
    return ""


def dim_cut(sizes: Sequence[int], part: int, cut: Cut) -> Cut:
    """The cut of a dim that a cut of its part `part` means: blocks = pre * blocks, unit = unit * post."""
    parts, blocks, unit = cut
    return parts, _product(sizes[:part]) * blocks, unit * _product(sizes[part + 1 :])


def _rank(coordinates: Sequence[int], cuts: Sequence[Cut]) -> int:
    rank = 0
    for coordinate, (parts, _, _) in zip(coordinates, cuts, strict=True):
        rank = rank * parts + coordinate
    return rank


def _product_intervals(sizes: Sequence[int], parts: Sequence[Intervals]) -> Iterator[tuple[int, int]]:
    """Intervals of the product dim whose part p holds `parts[p]`, ascending and merged."""
    last: tuple[int, int] | None = None
    for start, stop in _raw_product(sizes, parts):
        if last is not None and last[1] == start:
            last = (last[0], stop)
            continue
        if last is not None:
            yield last
        last = (start, stop)
    if last is not None:
        yield last


def _raw_product(sizes: Sequence[int], parts: Sequence[Intervals]) -> Iterator[tuple[int, int]]:
    inner = _product(sizes[1:])
    if all(intervals == ((0, size),) for size, intervals in zip(sizes[1:], parts[1:], strict=True)):
        yield from ((start * inner, stop * inner) for start, stop in parts[0])
        return
    rest = list(_raw_product(sizes[1:], parts[1:]))
    for start, stop in parts[0]:
        for index in range(start, stop):
            yield from ((index * inner + low, index * inner + high) for low, high in rest)


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
