"""Boundary of the sharded part in an eager program: whole tensors, local parts or DTensors, with gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autoshard.emit.runtime import ParallelMesh, copy, full_value, held_indices, slice_shard
from autoshard.emit.runtime.axis import shard_cuts
from autoshard.emit.runtime.full_tensors import plain

__all__ = [
    "fits", "full_value", "held_slices", "local_shape", "of_pairs", "part_of", "remaining_part",
    "undistributed",
]  # fmt: skip


def local_shape(shape: tuple[int, ...], layout: str, mesh: ParallelMesh) -> tuple[int, ...]:
    """Shape of this device's part."""
    return tuple(len(held_indices(size, dim, layout, mesh)) for dim, size in enumerate(shape))


def held_slices(shape: tuple[int, ...], layout: str, mesh: ParallelMesh) -> tuple[slice, ...]:
    """Slices of this device's part, dim by dim; the whole dim where it is sharded in blocks."""
    return tuple(_slice(held_indices(size, dim, layout, mesh).tolist()) for dim, size in enumerate(shape))


def _slice(held: list[int]) -> slice:
    if not held:
        return slice(0, 0)
    in_line = held[-1] - held[0] + 1 == len(held)
    return slice(held[0], held[-1] + 1) if in_line else slice(None)


def fits(got: tuple[int, ...], shape: tuple[int, ...], local: tuple[int, ...]) -> bool:
    """True if each dim is the global one, or this device's."""
    return all(size in (whole, part) for size, whole, part in zip(got, shape, local, strict=True))


def remaining_part(x: Tensor, shape: tuple[int, ...], layout: str, mesh: ParallelMesh) -> Tensor:
    """This device's part of a tensor without a gradient, of which each dim is whole or this device's already."""
    for dim, size in enumerate(shape):
        held = held_indices(size, dim, layout, mesh)
        if len(held) < size == x.shape[dim]:
            x = x.index_select(dim, held.to(x.device))
    return x


def part_of(x: Tensor, layout: str, mesh: ParallelMesh) -> Tensor:
    """This device's part of a whole tensor, whose gradient is whole and equal on all devices."""
    cuts = shard_cuts(layout, mesh)
    if not cuts or not (torch.is_grad_enabled() and x.requires_grad):
        for dim in sorted({dim for _, dim, *_ in cuts}):
            x = x.index_select(dim, held_indices(x.shape[dim], dim, layout, mesh).to(x.device))
        return x
    if plain(layout, mesh):
        for axis, dim, _, unit in cuts:
            x = slice_shard(x, axis, dim, unit=unit)
        return x
    for axis, *_ in cuts:  # any other cut: what a device lacks of the gradient is summed from the others
        x = copy(x, axis)
    for dim in sorted({dim for _, dim, *_ in cuts}):
        x = x.index_select(dim, held_indices(x.shape[dim], dim, layout, mesh).to(x.device))
    return x


def undistributed(x: Tensor) -> Tensor:
    """A DTensor as the whole tensor on every device; its gradient is whole."""
    if not isinstance(x, DTensor):
        return x
    whole = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    return whole.to_local(grad_placements=[Replicate()] * x.device_mesh.ndim)


def of_pairs(state: Mapping[str, Tensor], complex_names: Collection[str]) -> dict[str, Tensor]:
    """The original's state dict, from what ranks hold."""
    return {name: torch.view_as_complex(x) if name in complex_names else x for name, x in state.items()}
