"""Axes of a stage's mesh: replicas, which split the batch and nothing else, and those of a replica's devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.ir.graph import Op
from autoshard.ir.layout import Placement, Shard
from autoshard.rules.algebra.strategy import Strategy

REPLICAS = "dp"
DATA, INNER = range(2)  # their positions; those of a replica's devices from INNER on


def same_inside(strategy: Strategy, split: Strategy, exact: Sequence[bool] = ()) -> bool:
    """Does `strategy` do on the axes of a replica what `split` does on its mesh? Layouts are compared, as the letters
    of a rule leave out dims of one sample. A dim joined of samples and more is split within each sample, in as many
    blocks, but in none for an operand that is `exact`, which has no samples."""
    if (strategy.variant, strategy.host) != (split.variant, split.host):
        return False
    for one, two, held in zip(strategy.operands, split.operands, exact, strict=False):
        if held and one and two and one.placements[INNER:] != two.placements:
            return False
    layouts, other = ((*it.operands, *it.results) for it in (strategy, split))
    return all(
        (one is None) == (two is None)
        and (one is None or two is None or all(map(_alike, one.placements[INNER:], two.placements)))
        for one, two in zip(layouts, other, strict=True)
    )


def _alike(one: Placement, other: Placement) -> bool:
    if isinstance(one, Shard) and isinstance(other, Shard):
        return (one.dim, one.unit) == (other.dim, other.unit) and one.blocks % other.blocks == 0
    return one == other


def in_space(op: Op, strategy: Strategy, batch: Mapping[str, int]) -> bool:
    """Do replicas, on a stage's mesh, shard every operand and result that has the batch along it, and nothing else? An
    operator without one, such as a cast of a weight, may run on shards."""
    if batch.keys().isdisjoint((*op.operands, *op.results)):
        return True
    pairs = [*zip(op.operands, strategy.operands, strict=True), *zip(op.results, strategy.results, strict=True)]
    for name, layout in pairs:
        if name is None or layout is None:
            continue
        placement = layout.placements[DATA]
        if name in batch and not (isinstance(placement, Shard) and placement.dim == batch[name]):
            return False
        if name not in batch and isinstance(placement, Shard):
            return False
    return True
