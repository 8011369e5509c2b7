"""Storage of weights in shards: split as their uses are, and also over axes on which every use has them whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from autoshard.formulation.formulate import Formulation, Site
from autoshard.ir.graph import CAST, Graph, Op
from autoshard.ir.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Layout, Placement, Shard
from autoshard.rules.algebra.strategy import Strategy


def weight_uses(graph: Graph, chosen: Mapping[str, Strategy]) -> dict[str, list[Layout]]:
    """Weight -> the layouts in which operators read it, or what it is cast to."""
    source = {p.tensor: p.tensor for p in graph.parameters if p.trainable}
    uses: dict[str, list[Layout]] = {}
    for op in graph.ops:
        if op.target == CAST and op.operands[0] in source:
            source[op.results[0]] = source[op.operands[0]]
            continue
        for name, layout in zip(op.operands, chosen[op.name].operands, strict=True):
            if name in source and layout is not None:
                uses.setdefault(source[name], []).append(layout)
    return uses


def weight_sites(formulation: Formulation, uses: Mapping[str, object]) -> Iterable[tuple[int, Site]]:
    """Pairs (node, site) of the weights that are used."""
    return [(n, s) for n, s in enumerate(formulation.sites) if s.kind == "parameter" and s.name in uses]


def is_summed(uses: Sequence[Layout], axis: int) -> bool:
    """Is the gradient of one of the uses a sum over the axis?"""
    return any(use.placements[axis] == REPLICATE_PARTIAL for use in uses)


def is_whole(uses: Sequence[Layout], axis: int) -> bool:
    """Does every use have the weight whole along the axis?"""
    return placements_on(uses, axis) == {REPLICATE}


def placements_on(uses: Sequence[Layout], axis: int) -> set[Placement]:
    """Placements of a weight on one mesh axis, over all its uses."""
    placements = {use.placements[axis] for use in uses}
    return {REPLICATE if placement == REPLICATE_PARTIAL else placement for placement in placements}


def may_cast(op: Op, strategy: Strategy, weights: set[str]) -> bool | None:
    """May shards be cast, and gathered afterwards: does this cast of a weight leave the sum of its gradient to others?
    None for other operators."""
    if op.target != CAST or op.operands[0] not in weights:
        return None
    return not any(layout is not None and PARTIAL in layout.placements for layout in strategy.operands)


def shard_layouts(
    site: Site, uses: Sequence[Layout], sizes: Sequence[int], free: Sequence[bool], whole: bool = False
) -> list[int]:
    """Layouts of `site` that are split as the uses are, and on the `free` axes as far as possible, so that a gather
    over these leaves what is used, along one dim rather than several and the first one rather than others. If it is to
    be `whole`, the free axes are not split."""
    used = [placements_on(uses, axis) for axis in range(len(sizes))]

    def rank(layout: Layout) -> tuple[int, ...]:
        matches = devices = 0
        for placement, wanted, cut, length in zip(layout.placements, used, free, sizes, strict=True):
            if not cut:
                matches += placement in wanted
            elif isinstance(placement, Shard):
                devices += -1 if whole else round(1000 * math.log2(length))
        dims = [placement.dim for placement in layout.placements if isinstance(placement, Shard)]
        return (matches, devices, -_tangled(layout, free), -len({*dims}), -sum(dims))

    best = max(map(rank, site.layouts))
    return [s for s, layout in enumerate(site.layouts) if rank(layout) == best]


def _tangled(layout: Layout, free: Sequence[bool]) -> int:
    """Number of free axes that split a dim which a non-free axis inside them splits again: devices along the outer one
    together have parts of every shard, and none as it is used."""
    dims = [placement.dim if isinstance(placement, Shard) else None for placement in layout.placements]
    inside = ({dim for dim, cut in zip(dims[axis:], free[axis:], strict=True) if not cut} for axis in range(len(dims)))
    pairs = zip(dims, free, inside, strict=True)
    return sum(cut and dim is not None and dim in others for dim, cut, others in pairs)
