"""Layouts in which inputs, parameters and buffers may be stored, from what the operators that use them need."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from autoshard.ir.graph import Tensor
from autoshard.ir.intervals import multiple
from autoshard.ir.layout import (
    REPLICATE,
    REPLICATE_PARTIAL,
    AxisShard,
    Layout,
    Placement,
    Shard,
    local_sizes,
    normalise,
)
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.nesting import parts_problem


def plain(placement: Placement) -> Placement:
    """The placement as it may be stored or returned: never partial."""
    return placement if isinstance(placement, Shard) else REPLICATE


def as_stored(layout: Layout) -> Layout:
    """The layout without partial gradients, which change nothing about the value."""
    return Layout(tuple(REPLICATE if placement == REPLICATE_PARTIAL else placement for placement in layout.placements))


def input_layouts(tensor: Tensor, wanted: Iterable[Layout], mesh: Mesh) -> tuple[Layout, ...]:
    """Layouts of an input or buffer: those that its consumers need, sharded or replicated, never partial."""
    layouts = {Layout.replicated(mesh): None}
    for layout in wanted:
        layouts.setdefault(Layout(tuple(map(plain, layout.placements))))
    return tuple(layouts)


def buffer_layouts(tensor: Tensor, wanted: Iterable[Layout], mesh: Mesh) -> tuple[Layout, ...]:
    return tuple(layout for layout in input_layouts(tensor, wanted, mesh) if _storable(tensor, layout, mesh))


def storage_layouts(tensor: Tensor, wanted: Iterable[Layout], mesh: Mesh) -> tuple[Layout, ...]:
    """Layouts in which a parameter may be kept between steps (its optimizer layout).

    The product over axes of `R`, a plain shard of any dim (ZeRO) and every shard that a use needs; one (blocks, unit)
    per dim, so that it can be held unflattened, and no empty device. On the host it is kept in the layout of its use.
    """
    there = [layout for layout in wanted if layout.host and _storable(tensor, layout, mesh)]
    alphabet: dict[Placement, None] = {REPLICATE: None}
    for layout in wanted:
        for placement in layout.placements:
            alphabet.setdefault(plain(placement))
    for dim in range(len(tensor.shape)):
        alphabet.setdefault(Shard(dim))
    per_axis = [list(alphabet) if size > 1 else [REPLICATE] for size in mesh.sizes]
    layouts: dict[Layout, None] = {}
    for placements in itertools.product(*per_axis):
        layout = Layout(placements)
        if _storable(tensor, layout, mesh):
            layouts.setdefault(normalise(layout, tensor.shape, mesh))
    return (*(layout for layout in layouts if _storable(tensor, layout, mesh)), *there)


def _one_part_a_device(size: int, shard: AxisShard, shards: tuple[AxisShard, ...], mesh: Mesh) -> bool:
    """True unless a shard in parts of given lengths does not fit one part per device."""
    if not isinstance(shard.unit, tuple):
        return True
    return not parts_problem(size, mesh.axis_size(shard.axis), shard.unit, len(shards))


def _storable(tensor: Tensor, layout: Layout, mesh: Mesh) -> bool:
    last = tuple(size - 1 for size in mesh.sizes)
    for dim, size in enumerate(local_sizes(tensor.shape, layout, mesh)):
        kinds = {(shard.blocks, shard.unit) for shard in size.shards}
        if len(kinds) > 1 or any(tensor.shape[dim] % (blocks * multiple(unit)) for blocks, unit in kinds):
            return False
        if any(not _one_part_a_device(tensor.shape[dim], shard, size.shards, mesh) for shard in size.shards):
            return False
        if size.shards and size.evaluate(mesh, last) == 0:
            return False
    return True
