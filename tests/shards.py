"""Lays a global tensor on a mesh and checks that local tensors mean it: placements as pairs (value, gradient).

Independent of the code under test: everything goes by `LocalSize.intervals` on the global tensor.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from autoshard.ir.layout import PARTIAL, REPLICATE_PARTIAL, Layout, local_sizes
from autoshard.ir.mesh import Mesh


def part(whole: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """What the shards of `layout` leave on a device."""
    for dim, size in enumerate(local_sizes(tuple(whole.shape), layout, mesh)):
        intervals = size.intervals(mesh, mesh.coordinates(rank))
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in intervals]
        whole = torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
    return whole.clone()


def summed_axes(layout: Layout, gradient: bool) -> list[int]:
    """The axes over which the devices hold partials: `P` of a value, `R+` of a gradient."""
    return [a for a, p in enumerate(layout.placements) if p == (REPLICATE_PARTIAL if gradient else PARTIAL)]


def place(whole: Tensor, layout: Layout, mesh: Mesh, gradient: bool = False, seed: int = 0) -> list[Tensor]:
    """Every device's local tensor, in rank order; partial sums are random."""
    axes = summed_axes(layout, gradient)
    generator = torch.Generator().manual_seed(seed)
    combinations = list(itertools.product(*(range(mesh.sizes[a]) for a in axes)))
    partials = {c: torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for c in combinations[1:]}
    partials[combinations[0]] = whole - sum(partials.values())
    result = []
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        result.append(part(partials[tuple(coordinates[a] for a in axes)], layout, mesh, rank))
    return result


def assert_means(
    locals_: list[Tensor], whole: Tensor, layout: Layout, mesh: Mesh, gradient: bool = False, tolerance: float = 1e-11
) -> None:
    """Every device's tensor, summed over the axes that hold partial sums, is its part of the whole."""
    axes = summed_axes(layout, gradient)
    what = f"{'gradient' if gradient else 'value'} in {layout.on(mesh)}"
    for rank in range(mesh.size):
        coords = mesh.coordinates(rank)
        peers = [
            r for r in range(mesh.size) if all(a in axes or c == coords[a] for a, c in enumerate(mesh.coordinates(r)))
        ]
        expected = part(whole, layout, mesh, rank)
        shapes = {tuple(locals_[r].shape) for r in peers}
        assert shapes == {tuple(expected.shape)}, (
            f"{what}, rank {rank}: shape {shapes}, expected {tuple(expected.shape)}"
        )
        error = (sum(locals_[r] for r in peers) - expected).abs().amax().item() if expected.numel() else 0.0
        assert error <= tolerance, f"{what}, rank {rank}: error {error}"
