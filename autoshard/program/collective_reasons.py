"""Why a collective stands where it stands, in a reader's words: the comment beside it in the emitted code."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir.layout import Placement, Shard
from autoshard.redistribute.collective_table import kind

_WHY = {
    ("P", "R"): "sum the partial {tensor} over {axis}",
    ("P", "R+"): "sum the partial {tensor} over {axis}, and its gradient",
    ("P", "S"): "sum the partial {tensor} over {axis}, keep one shard of dim {to}",
    ("S", "R"): "{consumer} needs all of dim {dim}",
    ("S", "R+"): "{consumer} needs all of dim {dim}; its gradient is summed over {axis}",
    ("S", "S"): "{consumer} is cut along dim {to}, not {dim}",
    ("S", "P"): "{consumer} sums over {axis}: each device brings its own shard",
    ("R", "S"): "{consumer} is cut along dim {to} over {axis}",
    ("R", "R+"): "{consumer} is cut over {axis}: the gradient of {tensor} is summed in backward",
    ("R", "P"): "{consumer} is partial over {axis}: {tensor} is counted once",
    ("R+", "S"): "{consumer} is cut along dim {to} over {axis}",
    ("R+", "R"): "{consumer} gives every device the whole gradient: it is counted once",
    ("R+", "P"): "{consumer} is partial over {axis}: {tensor} is counted once",
}


def reason(
    axes: Sequence[str],
    before: Sequence[Placement],
    after: Sequence[Placement],
    by_index: bool,
    tensor: str,
    consumer: str,
) -> str:
    """One line for the step `before` -> `after` of `tensor` over `axes`, done for `consumer`."""
    over = " and ".join(axes)
    if by_index:
        there, here = (" ".join(map(str, placements)) for placements in (after, before))
        return f"{consumer} needs {there} over {over}, not {here}"
    first, second = before[0], after[0]
    dim = first.dim if isinstance(first, Shard) else ""
    to = second.dim if isinstance(second, Shard) else ""
    return _WHY[kind(first), kind(second)].format(axis=over, tensor=tensor, consumer=consumer, dim=dim, to=to)
