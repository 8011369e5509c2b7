"""Direct ways between layouts: one exchange over all axes whose shards change, and table steps next to it.

An exchange brings every device what it needs and lacks, by index sets, whatever the shards are (uneven, in blocks,
through blocks, nested, swapped). Next to it stand steps of the pair table over the axes that hold the same of the value
before and after (P to R, R to R+ and so on). So there is a way between any two layouts.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir.layout import REPLICATE, Layout, Shard
from autoshard.redistribute.collective_table import kind
from autoshard.redistribute.steps import Step, table_step

EXCHANGED = frozenset({("S", "S"), ("S", "R"), ("S", "R+"), ("S", "P"), ("R", "S"), ("R+", "S"), ("P", "S")})
# In one exchange the gradient goes back the way the value came (from R+), or by its own way: these need the latter.
OWN_WAY_BACK = frozenset({("R", "S"), ("S", "R"), ("S", "P")})


def direct_steps(source: Layout, target: Layout, shrinks: bool, all_to_all: bool = True) -> tuple[Step, ...]:
    """Steps of the direct way. `shrinks`: `target`'s local tensor is no larger, so that other steps come after."""
    pairs = _kinds(source, target)
    start, stop = list(source.placements), list(target.placements)
    apart = not all_to_all or not OWN_WAY_BACK.isdisjoint(pairs.values())
    for axis, pair in pairs.items():
        if pair not in EXCHANGED:
            if shrinks:
                stop[axis] = start[axis]
            else:
                start[axis] = stop[axis]
        elif (apart and pair == ("R+", "S")) or (pair == ("P", "S") and not all_to_all):
            start[axis] = REPLICATE  # as a step of its own, before
        elif pair == ("S", "P") or (pair == ("S", "R+") and not all_to_all):
            stop[axis] = REPLICATE  # as a step of its own, after
    first, last = Layout(tuple(start)), Layout(tuple(stop))
    middle = (_by_index(first, last, all_to_all),) if start != stop else ()
    return (*_by_table(source, first), *middle, *_by_table(last, target))


def _kinds(source: Layout, target: Layout) -> dict[int, tuple[str, str]]:
    """Kinds before and after, for each axis that changes."""
    pairs = enumerate(zip(source.placements, target.placements, strict=True))
    return {axis: (kind(x), kind(y)) for axis, (x, y) in pairs if x is not y and x != y}


# What one collective of its own does (gather, sum and scatter, slice) is no exchange, where the cuts are clean.
_OWN_COLLECTIVE = (
    frozenset({("S", "R"), ("S", "R+")}),
    frozenset({("P", "S")}),
    frozenset({("R", "S"), ("R+", "S")}),
)


def really_exchanges(steps: Sequence[Step]) -> bool:
    """True where a direct way does what no single collective of the pair table does."""
    for step in steps:
        if step.by_index:
            pairs = zip(step.before, step.after, strict=True)
            kinds = {(kind(x), kind(y)) for x, y in pairs if x != y}
            return not any(kinds <= covered for covered in _OWN_COLLECTIVE)
    return False


def _by_table(source: Layout, target: Layout) -> list[Step]:
    """Steps of the pair table, one for each pair of kinds, over all axes that have it; they commute."""
    groups: dict[tuple[str, str], list[int]] = {}
    for axis, pair in _kinds(source, target).items():
        groups.setdefault(pair, []).append(axis)
    return [table_step(axes, source, target) for axes in groups.values()]


def _by_index(source: Layout, target: Layout, all_to_all: bool) -> Step:
    axes = exchange_axes(source, target)
    before, after = (tuple(layout.placements[a] for a in axes) for layout in (source, target))
    pairs = [(kind(x), kind(y)) for x, y in zip(before, after, strict=True)]
    moves = "exchange" if all_to_all else "gather"
    forward = "pick" if all(y == "S" != x and x != "P" for x, y in pairs) else moves
    if any(x == "R+" for x, _ in pairs):
        return Step(axes, before, after, forward, "pad" if forward == "pick" else moves)
    return Step(axes, before, after, forward, "pick" if all(pair == ("S", "R") for pair in pairs) else moves)


def exchange_axes(source: Layout, target: Layout) -> tuple[int, ...]:
    """Axes over which data move: those that change, and shards inside one that changes on the same dim."""
    axes: list[int] = []
    touched: set[int] = set()  # dims that an outer axis cuts otherwise
    for axis, (x, y) in enumerate(zip(source.placements, target.placements, strict=True)):
        if x != y or (isinstance(x, Shard) and x.dim in touched):
            axes.append(axis)
        if x != y:
            touched |= {p.dim for p in (x, y) if isinstance(p, Shard)}
    return tuple(axes)


def representative_pairs(
    sources: Sequence[Layout], targets: Sequence[Layout], chosen: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """One of the chosen pairs for each combination of kinds, with and without blocks."""
    seen: dict[tuple[object, ...], tuple[int, int]] = {}
    for i, j in chosen:
        key = tuple(
            (kind(p), isinstance(p, Shard) and (p.blocks, p.unit) != (1, 1))
            for p in (*sources[i].placements, *targets[j].placements)
        )
        seen.setdefault(key, (i, j))
    return list(seen.values())
