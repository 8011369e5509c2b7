"""Equal blocks at one of few points each: how many at which, counted out. With several chunks, what a block keeps more
than the leanest takes more in one chunk of a stage than in another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.stages.stage_problem import StageProblem
from autoshard.units import EXACT

_INF = float("inf")
COUNTED = 3  # points of a kind


@dataclass(frozen=True, eq=False)
class Sum:
    """Undominated totals, bytes ascending, seconds descending; `parents`: (entry of the sum before, point added)."""

    seconds: Floats
    bytes: Floats
    before: Integers
    point: Integers

    @cached_property
    def size(self) -> int:
        return len(self.seconds)


def undominated(seconds: Floats, sizes: Floats) -> Integers:
    """Entries that none is as small as in both, bytes ascending."""
    order = np.lexsort((seconds, sizes))
    ordered = seconds[order]
    least = np.concatenate([[_INF], np.minimum.accumulate(ordered)[:-1]]) if len(ordered) else ordered
    pareto: Integers = order[ordered < least]
    return pareto


def mixed(points: Sum, blocks: Integers, room: Floats, ratios: Floats) -> tuple[Floats, Integers]:
    """(least seconds, blocks at each point) of so many blocks each, in so much room. At most `COUNTED` points: for each
    number at the third, as many take the second as fit. `ratios` of the chunks, ascending, by what bytes beyond the
    leanest point's are multiplied there; what takes most stands in the first."""
    sizes, seconds = points.bytes - points.bytes[0], points.seconds - points.seconds[0]
    third = np.arange(int(blocks.max()) + 1 if points.size > 2 else 1)[None, :]
    more = sizes[2] - sizes[1] if points.size > 2 else 0.0
    each = blocks[:, None] / len(ratios)
    spare = (room - blocks * points.bytes[0])[:, None] - more * _weighed(third, each, ratios)
    left = blocks[:, None] - third
    reach = _reached(spare / sizes[1] * (1 + EXACT), each, ratios)
    second = np.clip(reach - third, 0, np.maximum(left, 0)).astype(np.int64)
    gain = third * (seconds[2] if points.size > 2 else 0.0) + second * seconds[1]
    gain = np.where((left >= 0) & (reach >= third), gain, _INF)
    best = gain.argmin(axis=1)
    rows = np.arange(len(blocks))
    taken = np.stack([blocks - best - second[rows, best], second[rows, best], best], axis=1)
    return blocks * points.seconds[0] + gain[rows, best], taken[:, : points.size]


def _weighed(blocks: Integers, each: Floats, ratios: Floats) -> Floats:
    """The sum of ratios of so many blocks, `each` of which stand in a chunk, the chunks one after the other."""
    terms = (ratio * np.clip(blocks - chunk * each, 0, each) for chunk, ratio in enumerate(ratios))
    return sum(terms, np.zeros(1))


def _reached(total: Floats, each: Floats, ratios: Floats) -> Floats:
    """The most blocks of which that sum is at most `total`; the last chunk has no end. Negative where that is."""
    reached, before = np.where(total < 0, -1.0, 0.0), np.zeros(1)
    for chunk, ratio in enumerate(ratios):
        inside = np.maximum(np.floor((total - before) / ratio), 0.0)
        reached = reached + (np.minimum(inside, each) if chunk < len(ratios) - 1 else inside)
        before = before + ratio * each
    return reached


def first_chunk_seconds(problem: StageProblem, stage: int, most: int) -> Floats:
    """[n]: the least that n blocks of the run take in the first chunk of a stage, 0 to `most`: each other chunk holds n
    at their leanest. Infinite where that doesn't fit."""
    front, blocks = problem.fronts[problem.line[problem.run[0]]], np.arange(most + 1)
    fastest = np.asarray(blocks * float(front.seconds.min()), np.float64)
    ratios = problem.chunk_ratios(stage)
    if ratios is None or len(ratios) != problem.chunks:
        return fastest
    sizes = problem.point_bytes(stage)[problem.line[problem.run[0]]]
    pareto = undominated(front.seconds, sizes)
    if not 1 < len(pareto) <= COUNTED:
        return fastest
    points = Sum(front.seconds[pareto], sizes[pareto], np.zeros(len(pareto), np.int64), pareto)
    room = problem.capacity_bytes[stage] - front.working_bytes.min() - (problem.chunks - 1) * blocks * points.bytes[0]
    return np.maximum(fastest, mixed(points, blocks, room, ratios[:1])[0])
