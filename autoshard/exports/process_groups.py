"""Which ranks communicate with which: the process groups of a mesh."""

from __future__ import annotations

import numpy as np

from autoshard.ir.mesh import Mesh


def group_of(mesh: Mesh, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """The ranks, ascending, of the group of `rank` over the joined axes; ranks are row-major over the mesh."""
    ranks = np.arange(mesh.size).reshape(mesh.sizes)
    place = mesh.coordinates(rank)
    index = tuple(slice(None) if name in axes else place[i] for i, name in enumerate(mesh.names))
    return tuple(int(r) for r in np.sort(ranks[index].reshape(-1)))


def group_number(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """A number that all groups over the same axes share: axes as bits."""
    return sum(1 << mesh.index(axis) for axis in axes)
