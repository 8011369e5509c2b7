"""Transfers of a tensor from one mesh to another: how much each device sends to each, by index sets of both layouts.

As in the package (`emit/runtime/between_meshes.py`): if several devices hold the same, each reader receives from the
one that has sent least; a sum is made on the first mesh, and enters one on the second at 0 of its axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autoshard.ir.layout import PARTIAL, Layout, LocalSize, local_sizes
from autoshard.ir.mesh import Mesh

On = tuple[Mesh, Layout]
_Held = tuple[tuple[tuple[int, int], ...], ...]  # runs of indices, of each dim


def sent_and_received(shape: Sequence[int], first: On, second: On) -> tuple[list[int], list[int]]:
    """Elements that each device of the first mesh sends, and that each of the second receives."""
    sent, received = [0] * first[0].size, [0] * second[0].size
    for (sender, receiver), count in transfers(tuple(shape), first, second).items():
        sent[sender] += count
        received[receiver] += count
    return sent, received


@lru_cache(maxsize=4096)
def transfers(shape: tuple[int, ...], first: On, second: On) -> dict[tuple[int, int], int]:
    """(sender, receiver) -> elements, for pairs between which something travels."""
    holders: dict[_Held, list[int]] = {}
    for rank, held in enumerate(held_by(shape, first)):
        holders.setdefault(held, []).append(rank)
    sent = [0] * first[0].size
    elements = {}
    mesh, layout = second
    for receiver, needs in enumerate(held_by(shape, second)):
        at = mesh.coordinates(receiver)
        if any(placement == PARTIAL and at[axis] for axis, placement in enumerate(layout.placements)):
            continue
        for has, ranks in holders.items():
            size = math.prod(_common(a, b) for a, b in zip(has, needs, strict=True))
            if size:
                sender = min(ranks, key=lambda rank: (sent[rank], rank != receiver, rank))
                sent[sender] += size
                elements[sender, receiver] = size
    return elements


def held_by(shape: tuple[int, ...], on: On) -> list[_Held]:
    """Index ranges that each device holds of each dim; of a sum, those of its partial sum."""
    mesh, layout = on
    sizes = local_sizes(shape, layout, mesh)
    return [tuple(_runs(size, mesh, rank) for size in sizes) for rank in range(mesh.size)]


def _runs(size: LocalSize, mesh: Mesh, rank: int) -> tuple[tuple[int, int], ...]:
    return tuple(size.intervals(mesh, mesh.coordinates(rank))) if size.shards else ((0, size.size),)


@lru_cache(maxsize=16384)
def _common(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> int:
    """Number of indices that both have."""
    if not a or not b:
        return 0
    x, y = np.array(a), np.array(b)
    low, high = np.maximum.outer(x[:, 0], y[:, 0]), np.minimum.outer(x[:, 1], y[:, 1])
    return int(np.maximum(high - low, 0).sum())
