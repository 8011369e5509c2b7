"""What an exchange moves between the devices of a group, against a count of every element."""

from __future__ import annotations

import itertools
import random

import pytest

from autoshard.costs import buffers
from autoshard.ir.layout import PARTIAL, REPLICATE, Layout, Shard, local_sizes
from autoshard.ir.mesh import Mesh

MESHES = ((("a", 2),), (("a", 2), ("b", 3)), (("a", 4), ("b", 2), ("c", 2)))


def _elements(shape: tuple[int, ...], layout: Layout, mesh: Mesh, at: tuple[int, ...]) -> set[tuple[int, ...]]:
    dims = [
        [i for start, stop in size.intervals(mesh, at) for i in range(start, stop)]
        for size in local_sizes(shape, layout, mesh)
    ]
    return set(itertools.product(*dims))


def _counted(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...], before: Layout, after: Layout) -> buffers.Route:
    moved = [mesh.index(axis) for axis in axes]
    at = [
        tuple(dict(zip(moved, place, strict=True)).get(axis, 0) for axis in range(len(mesh.axes)))
        for place in itertools.product(*(range(mesh.sizes[axis]) for axis in moved))
    ]
    same = [a for a in moved if not (isinstance(before.placements[a], Shard) or _is_summed(before, after, a))]
    have, need = ([_elements(shape, layout, mesh, place) for place in at] for layout in (before, after))

    def common(giver: int, taker: int) -> int:
        if any(at[giver][axis] != at[taker][axis] for axis in same):
            return 0
        return len(have[giver] & need[taker])

    routes = []
    for here in range(min(len(at), buffers.MEMBERS)):
        others = [n for n in range(len(at)) if n != here]
        each = [n for other in others for n in (common(here, other), common(other, here))]
        routes.append((sum(each), common(here, here), max([*each, common(here, here)])))
    return buffers.Route(*map(max, zip(*routes, strict=True)))


def _is_summed(before: Layout, after: Layout, axis: int) -> bool:
    return before.placements[axis] == PARTIAL != after.placements[axis]


@pytest.mark.parametrize("seed", range(4))
def test_a_route_has_every_element_that_moves(seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(40):
        mesh = Mesh(drawn.choice(MESHES))
        shape = tuple(drawn.choice([1, 5, 6, 8, 12]) for _ in range(drawn.randrange(3)))
        before, after = (Layout(tuple(_placement(drawn, shape) for _ in mesh.axes)) for _ in range(2))
        axes = tuple(name for name in mesh.names if drawn.random() < 0.7) or mesh.names[:1]
        found = buffers._route(mesh, axes, shape, before, after)
        assert found == _counted(mesh, axes, shape, before, after), (mesh, axes, shape, str(before), str(after))


def _placement(drawn: random.Random, shape: tuple[int, ...]) -> Shard | object:
    if not shape or drawn.random() < 0.4:
        return drawn.choice([REPLICATE, PARTIAL])
    dim = drawn.randrange(len(shape))
    blocks = drawn.choice([own for own in (1, 2, 3) if shape[dim] % own == 0])
    unit = drawn.choice([own for own in (1, 2) if shape[dim] // blocks % own == 0])
    return Shard(dim, blocks=blocks, unit=unit)
