"""How a weight gets to where it is used: the planned steps, in the form in which weights of a block go together.

A plan prices each redistribution alone; one gather and one scatter for many weights are cheaper than what is cheapest
for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.ir.layout import Layout, Shard, parse_placement
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import PlanStep
from autoshard.redistribute.steps import clean_cut

_GATHER = ("all_gather", "reduce_scatter")


def weight_way(steps: Sequence[PlanStep], layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> list[PlanStep]:
    """The steps that a weight of `shape`, stored in `layout`, really takes."""
    joined: list[PlanStep] = []
    for step in _scattered(steps):
        both = _at_once(joined[-1], step, layout, shape, mesh) if joined else None
        if both is not None:
            joined[-1] = both
        else:
            joined.append(step)
    return joined


def _at_once(one: PlanStep, other: PlanStep, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> PlanStep | None:
    """Two gathers, one after the other, as one over the axes of both; None where their cuts are not one cut."""
    if any((step.forward, step.backward) != _GATHER for step in (one, other)):
        return None
    axes = sorted(mesh.index(axis) for axis in (*one.axes, *other.axes))
    shards = [(axis, layout.placements[axis]) for axis in axes]
    before = dict(zip((*one.axes, *other.axes), (*one.before, *other.before), strict=True))
    after = dict(zip((*one.axes, *other.axes), (*one.after, *other.after), strict=True))
    inner = tuple((axis, shard) for axis, shard in shards if isinstance(shard, Shard))
    if len(inner) < len(axes) or len({shard.dim for _, shard in inner}) > 1:
        return None
    if any(parse_placement(before[mesh.names[axis]]) != shard for axis, shard in inner):
        return None
    dim = inner[0][1].dim
    outer = tuple((axis, shard) for axis, shard in layout.shards(dim) if axis not in axes)
    if any(axis > axes[0] for axis, _ in outer) or clean_cut(shape[dim], outer, inner, mesh) is None:
        return None
    names = tuple(mesh.names[axis] for axis in axes)
    return replace(
        one, axes=names, before=tuple(map(before.__getitem__, names)), after=tuple(map(after.__getitem__, names))
    )


def _scattered(steps: Sequence[PlanStep]) -> list[PlanStep]:
    """The steps of a weight: a gather whose gradient is all-reduced in the next step, and sliced, scatters it at once.

    A small all-reduce may be cheaper than a reduce-scatter alone, but the weights of a block go together."""
    joined: list[PlanStep] = []
    for step in steps:
        last = joined[-1] if joined else None
        ways = [(own.forward, own.backward) for own in (last, step) if own is not None]
        if last is not None and ways == [("all_gather", "slice"), ("", "all_reduce")] and {*last.axes} <= {*step.axes}:
            count, left = len(last.axes), tuple(axis for axis in step.axes if axis not in last.axes)
            joined[-1] = replace(last, after=step.after[:count], backward="reduce_scatter")
            if left:
                joined.append(replace(step, axes=left, before=step.before[: len(left)], after=step.after[: len(left)]))
            continue
        joined.append(step)
    return joined
