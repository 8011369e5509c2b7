"""The points of a single stage's blocks, exactly, within what it holds as each block runs.

While a block runs, those after it keep nothing. So the room of a block depends on what those before it keep alone:
plans are followed along the line, and of those that keep as much the fastest is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.stages.counted_points import undominated

_MOST = 20_000  # plans that are followed at once


class RunningBlock(NamedTuple):
    """Running block, by point. `beside`: what is held as it runs, but for what it and those before it keep."""

    seconds: Floats
    saved: Floats
    beside: Floats


class _Followed(NamedTuple):
    """Plans up to a block: what they take and keep, the plan up to the block before and the point added."""

    seconds: Floats
    saved: Floats
    before: Integers
    point: Integers


def least_peak(blocks: Sequence[RunningBlock]) -> float:
    """Peak of the plan that holds least as its fullest block runs; infinite where too many are to be followed."""
    peak, kept_bytes = np.zeros(1), np.zeros(1)
    for block in blocks:
        after = np.add.outer(kept_bytes, block.saved)
        peak, kept_bytes = np.maximum(peak[:, None], after + block.beside).ravel(), after.ravel()
        some = undominated(peak, kept_bytes)
        peak, kept_bytes = peak[some], kept_bytes[some]
        if len(peak) > _MOST:
            return np.inf
    return float(peak.min())


def fastest_points(blocks: Sequence[RunningBlock], room: float) -> tuple[int, ...] | None:
    """Points of the fastest plan that never holds more; None where there is none, or too many are to be followed."""
    nothing = np.zeros(1, np.int64)
    steps = [_Followed(np.zeros(1), np.zeros(1), nothing, nothing)]
    for block in blocks:
        kept_bytes = np.add.outer(steps[-1].saved, block.saved)
        some = np.flatnonzero(kept_bytes + block.beside <= room)
        seconds, kept_bytes = np.add.outer(steps[-1].seconds, block.seconds).ravel(), kept_bytes.ravel()
        some = some[undominated(seconds[some], kept_bytes[some])]
        if not 0 < len(some) <= _MOST:
            return None
        steps.append(_Followed(seconds[some], kept_bytes[some], *np.divmod(some, len(block.seconds))))
    entry, points = int(steps[-1].seconds.argmin()), list[int]()
    for step in reversed(steps[1:]):
        points.append(int(step.point[entry]))
        entry = int(step.before[entry])
    return tuple(reversed(points))
