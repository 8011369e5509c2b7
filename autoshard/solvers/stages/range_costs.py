"""The least seconds of every range of the line on every stage, and the points of its blocks there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.stages.block_sums import BlockSums
from autoshard.solvers.stages.stage_problem import Part, StageProblem

_INF = float("inf")


class RangeCosts:
    """Costs of ranges of blocks, for one way to count a point: `share` of its micro-batch's seconds and sends, and
    `tail` times its tail.

    Ranges begin and end at allowed cut points (`places`, positions in the line, first and last with them); on each
    stage they are tables by (place of the end, how many places it is long).
    """

    def __init__(self, problem: StageProblem, share: float, tail: float) -> None:
        self.problem, self.share = problem, share
        self.places = cut_places(problem)
        every = (problem.of_stage(stage) for stage in range(problem.stages))
        self.costs = [[share * front.seconds + tail * front.tail_seconds for front in fronts] for fronts in every]
        self.block_sums: dict[int, BlockSums] = {}
        self.ranges = _every_range(problem.line, len(problem.fronts), tuple(self.places))
        self.counts = block_counts(problem.line, len(problem.fronts))
        self.known = [np.full(len(self.ranges.counts), np.nan) for _ in range(problem.stages)]
        self.rooms = [np.full(len(self.ranges.counts), -1) for _ in range(problem.stages)]
        least = [min(float(cost.min(initial=_INF)) for cost in costs) for costs in zip(*self.costs, strict=True)]
        self.line_least = self.counts @ np.array(least)  # each block on the stage where it takes least

    def sent(self, stage: int) -> float:
        return self.share * self.problem.send_seconds * sum(self.problem.sends(stage))

    def sums(self, stage: int) -> BlockSums:
        if stage not in self.block_sums:
            sizes = self.problem.point_bytes(stage)
            working = [front.working_bytes for front in self.problem.of_stage(stage)]
            run, ratios = self.problem.line[self.problem.run[0]], self.problem.chunk_ratios(stage)
            dealt = None if ratios is None else (run, np.sort(ratios))
            self.block_sums[stage] = BlockSums(
                self.costs[stage], sizes, working, float(self.problem.capacity_bytes[stage]), dealt
            )
        return self.block_sums[stage]

    def from_start(self) -> Floats:
        """[place]: of the blocks before each place on the first stage, infinite where they don't fit or may not be
        there."""
        allowed = self._allowed(0)[:, 0]
        return np.where(allowed, self._costs(0, self.ranges.numbers[:, 0]), _INF)

    def points(self, stage: int, begin: int, end: int) -> list[list[int]]:
        """Points of the blocks between two places, a range of a table that was made."""
        number = self.ranges.numbers[end, begin]
        return self.sums(stage).points(self.ranges.counts[number], int(self.rooms[stage][number]))

    def table(self, most: float) -> list[Floats]:
        """[stage][end, length in places]: ranges that may take at most `most`; the others are infinite."""
        problem, places = self.problem, len(self.places)
        least, most = self.line_least[self.places], most * (1 + 1e-12)
        longest = max(int(np.searchsorted(least, base + most, side="right")) - 1 - i for i, base in enumerate(least))
        end, length = np.arange(places)[:, None], np.arange(max(longest, 0) + 1)[None, :]
        begin = end - length
        short = (length > 0) & (begin >= 0)
        begin = np.maximum(begin, 0)
        short &= least[end] - least[begin] <= most
        table = []
        for stage in range(problem.stages):
            left = problem.stages - stage - 1  # every later stage takes a place
            starts = begin == 0 if stage == 0 else begin >= stage
            stops = end == places - 1 if left == 0 else end < places - left
            where = np.nonzero(short & starts & stops & self._allowed(stage)[end, begin])
            stage_table = np.full(short.shape, _INF)
            cost = self._costs(stage, self.ranges.numbers[end[where[0], 0], begin[where]])
            stage_table[where] = np.where(cost <= most, cost, _INF)
            table.append(stage_table)
        return table

    def _costs(self, stage: int, numbers: Integers) -> Floats:
        known, sums = self.known[stage], self.sums(stage)
        wanted = np.zeros(len(known), bool)
        wanted[numbers] = True
        fresh = np.flatnonzero(wanted & np.isnan(known))
        if len(fresh):
            known[fresh], self.rooms[stage][fresh] = sums.least_and_room(self.ranges.counts[fresh])
        seconds: Floats = known[numbers] + self.sent(stage)
        return seconds

    def _allowed(self, stage: int) -> NDArray[np.bool_]:
        """[end, begin]: may the blocks between be on the stage?"""
        if self.problem.allowed is None:
            return np.ones((len(self.places),) * 2, bool)
        out = np.concatenate([[0], np.cumsum(~self.problem.allowed[stage])])[self.places]
        allowed: NDArray[np.bool_] = out[:, None] == out[None, :]
        return allowed


@dataclass(frozen=True, eq=False)
class _Ranges:
    """`numbers[end, begin]` of a range by places: equal where the blocks of each kind, a row of `counts`, are."""

    numbers: Integers
    counts: Integers


@lru_cache(maxsize=64)
def _every_range(line: tuple[int, ...], kinds: int, places: tuple[int, ...]) -> _Ranges:
    counts = block_counts(line, kinds)[list(places)]
    radix = [1]
    for count in counts[-1]:
        radix.append(radix[-1] * (2 * int(count) + 1))
    exact = counts.astype(np.int64 if radix[-1] < 2**62 else object) @ np.array(radix[:-1], dtype=object).astype(
        np.int64 if radix[-1] < 2**62 else object
    )
    keys = exact[:, None] - exact[None, :]
    _, first, numbers = np.unique(keys, return_index=True, return_inverse=True)
    ends, begins = np.divmod(first, len(places))
    return _Ranges(numbers.reshape(keys.shape), counts[ends] - counts[begins])


@lru_cache(maxsize=64)
def block_counts(line: tuple[int, ...], kinds: int) -> Integers:
    """[place, kind]: blocks of each kind before a place in the line."""
    counts = np.zeros((len(line) + 1, kinds), dtype=np.int64)
    np.add.at(counts, (np.arange(len(line)) + 1, np.array(line)), 1)
    cumulative: Integers = counts.cumsum(axis=0)
    return cumulative


def cut_places(problem: StageProblem) -> list[int]:
    """Places where stages may begin and end. With several chunks, each takes equally much of the run of equal blocks:
    what is before the run belongs to the first part, what is after it to the last part."""
    blocks = len(problem.line)
    if problem.chunks == 1:
        return list(range(blocks + 1))
    start, stop = problem.run
    return [0, *range(start + problem.chunks, stop, problem.chunks), blocks]


def parts_of(problem: StageProblem, cuts: list[int]) -> list[Part]:
    """The parts of stages that take ranges [cuts[s], cuts[s + 1]) of the line, in the order of the model."""
    if problem.chunks == 1:
        return [Part(s, 0, cuts[s], cuts[s + 1]) for s in range(problem.stages)]
    start, stop = problem.run
    inner = [start, *cuts[1:-1], stop]
    each = [(inner[s + 1] - inner[s]) // problem.chunks for s in range(problem.stages)]
    position = 0
    parts: list[Part] = []
    for chunk in range(problem.chunks):
        for stage in range(problem.stages):
            first = position
            position = (start if not parts else first) + each[stage]
            parts.append(Part(stage, chunk, first, position))
    parts[-1] = Part(problem.stages - 1, problem.chunks - 1, parts[-1].first, len(problem.line))
    return parts
