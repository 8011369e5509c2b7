"""Shard counts as layouts: which mesh axes give them, and which meshes have such axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autoshard.constraints.shard_counts import Counts
from autoshard.errors import UsageError
from autoshard.ir.layout import REPLICATE, Layout, Placement, Shard
from autoshard.ir.mesh import Mesh


def layouts_with(counts: Counts, mesh: Mesh) -> Iterator[Layout]:
    """Every layout on `mesh` that shards each dim as often as `counts` says, outer axes on the first dims first."""

    def assign(axis: int, left: tuple[int, ...], chosen: tuple[Placement, ...]) -> Iterator[Layout]:
        if axis == len(mesh.sizes):
            if all(count == 1 for count in left):
                yield Layout(chosen)
            return
        size = mesh.sizes[axis]
        for dim, count in enumerate(left):
            if size > 1 and count % size == 0:
                remaining = (*left[:dim], count // size, *left[dim + 1 :])
                yield from assign(axis + 1, remaining, (*chosen, Shard(dim)))
        yield from assign(axis + 1, left, (*chosen, REPLICATE))

    yield from assign(0, counts, ())


def layout_with(counts: Counts, mesh: Mesh, what: str) -> Layout:
    """The first of `layouts_with`. UsageError says what the mesh can't do; `what` is the tensor."""
    layout = next(layouts_with(counts, mesh), None)
    if layout is None:
        raise UsageError(
            f"{what}: no axes of the mesh {mesh} cut it {counts} times", "counts that are products of axes"
        )
    return layout


def meshes_with(every: Sequence[Counts], offered: Sequence[Mesh], devices: int) -> tuple[Mesh, ...]:
    """Meshes of `offered` with the fewest axes on which all these counts are possible.

    Where there are none, the mesh with an axis for every prime factor. UsageError where counts can't be on so many
    devices at all.
    """
    for counts in every:
        needed = math.prod(counts)
        if devices % needed:
            raise UsageError(f"{counts} needs {needed} devices, and {devices} are no multiple of it", "other counts")
    fit = [mesh for mesh in offered if all(next(layouts_with(counts, mesh), None) for counts in every)]
    if fit:
        fewest = min(len(mesh.axes) for mesh in fit)
        return tuple(mesh for mesh in fit if len(mesh.axes) == fewest)
    sizes = sorted(_primes(devices))
    return (Mesh(tuple((f"axis{number}", size) for number, size in enumerate(sizes))),)


def _primes(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1
