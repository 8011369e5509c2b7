"""Whole tensors assembled from the parts that devices hold."""

from __future__ import annotations

from torch import Tensor

from .axis import held_indices, shard_cuts, shard_size
from .mesh import ParallelMesh
from .redistribution import all_gather, all_reduce


def full_value(x: Tensor, shape: tuple[int, ...], layout: str, mesh: ParallelMesh) -> Tensor:
    """The whole tensor on every device, from parts with the layout `layout` (`P` is summed)."""
    for name, placement in zip(mesh.axes, layout.split(), strict=True):
        if placement == "P":
            x = all_reduce(x, mesh[name])
    cuts = shard_cuts(layout, mesh)
    if plain(layout, mesh):
        for i, (axis, dim, _, unit) in reversed(list(enumerate(cuts))):  # inner axes first
            size = shape[dim]
            for outer, d, _, outer_unit in cuts[:i]:
                size = shard_size(size, outer, 1, outer_unit) if d == dim else size
            x = all_gather(x, axis, dim, size=size, unit=unit)
        return x
    for dim in sorted({dim for _, dim, *_ in cuts}):
        held = held_indices(shape[dim], dim, layout, mesh).to(x.device)
        x = x.new_zeros((*x.shape[:dim], shape[dim], *x.shape[dim + 1 :])).index_copy(dim, held, x)
    for axis, *_ in cuts:
        x = all_reduce(x, axis)
    return x


def plain(layout: str, mesh: ParallelMesh) -> bool:
    """Does sharding axis after axis give this layout, without blocks?"""
    return all(blocks == 1 for _, _, blocks, _ in shard_cuts(layout, mesh))
