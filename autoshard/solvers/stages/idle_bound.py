"""Least waits of a stage of one chunk in any order, because its memory holds only so many micro-batches.

A stage that holds K micro-batches runs at most K forwards before its first backward, which comes no sooner than a
micro-batch has passed all stages after it, in D seconds both ways. So the stage waits at least D - (K - 1) f before it.
After its last forward at most K backwards are left, and that forward's own comes D later: the stage waits at least
D - (K - 1) b. With fewer than all micro-batches held, the last forward is after the first backward, and both waits
count. Keeping less lets a stage hold more micro-batches, at the price of recompute: of all K the best is taken, for
each range of blocks.

Waits of a device after its last backward: collectives that run once a step, each as its block's backward ends.

Blocks end in the reverse of the model's order, and their collectives take turns. So after the backward of block j, with
the blocks before it still to run, those of blocks 0 to j are left:

    exposed >= max over j of (sum_{i <= j} late_i - sum_{i < j} backward_i)

The backward that hides a collective takes a part of what it hides longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common.effort import ROUNDS
from autoshard.solvers.stages.block_sums import BlockSums
from autoshard.solvers.stages.range_costs import RangeCosts
from autoshard.solvers.stages.stage_problem import StageProblem, point_bytes

_INF = float("inf")
GROW = 1.25  # times the last: groups, limits that are tried


class IdleBound:
    """Over `costs`, which count a point's seconds once and no tail, and their `table`."""

    def __init__(self, costs: RangeCosts, table: list[Floats]) -> None:
        assert costs.problem.chunks == 1
        self.costs, self.problem = costs, costs.problem
        self.known: dict[tuple[int, int, float], Floats] = {}
        self.sums: dict[tuple[int, int, float], BlockSums] = {}
        every = map(self.problem.of_stage, range(self.problem.stages))
        self.forward = [
            [np.array([extreme(front.forward_seconds) for front in fronts]) for extreme in (np.min, np.max)]
            for fronts in every
        ]
        self.after = _least_after(table)

    def busy(self, stage: int, table: Floats) -> Floats:
        """[end, length]: seconds from the first forward on the stage to its last backward, at least. `table`: its
        table."""
        seconds, (end, length) = np.full(table.shape, _INF), np.nonzero(np.isfinite(table + self.after[stage][:, None]))
        numbers = self.costs.ranges.numbers[end, end - length]
        seconds[end, length] = self._least(stage, numbers, table[end, length], self.after[stage][end])
        return seconds

    def _least(self, stage: int, numbers: Integers, seconds: Floats, later: Floats) -> Floats:
        """Least step for ranges that take `seconds` as the schedule has it, with `later` in the stages after."""
        count = self.problem.micro_batches
        shortest, longest = (self.costs.ranges.counts[numbers] @ each for each in self.forward[stage])
        sent = self.problem.send_seconds * self.problem.sends(stage)[0]
        best = np.full(len(numbers), _INF)
        for first, last in _held(int(self.problem.live[stage]), count):
            seconds = np.maximum(seconds, self._seconds(stage, first, numbers))  # infinite where so many don't fit
            if last >= count:  # all forwards may come first
                best = np.minimum(best, count * seconds)
                break
            started = np.maximum(later - (last - 1) * (longest + sent), 0.0)
            backward = np.where(np.isfinite(seconds), seconds - shortest - sent, 0.0)
            ended = np.maximum(later - (last - 1) * backward, 0.0)
            best = np.minimum(best, count * seconds + started + ended)
            if (count * seconds >= best).all():
                break
        return best

    def _seconds(self, stage: int, held: int, numbers: Integers) -> Floats:
        """The least of ranges of which the stage can hold so many micro-batches, its sends with them."""
        kind = self.problem.every_front.index(self.problem.of_stage(stage))
        key = kind, held, self.problem.held_room(stage, held)
        if key not in self.known:
            fronts = self.problem.of_stage(stage)
            sizes = [point_bytes(front, float(held)) for front in fronts]
            self.sums[key] = BlockSums(self.costs.costs[stage], sizes, [f.working_bytes for f in fronts], key[2])
            self.known[key] = np.full(len(self.costs.ranges.counts), np.nan)
        known, wanted = self.known[key], np.unique(numbers)
        fresh = wanted[np.isnan(known[wanted])]
        if len(fresh):
            known[fresh] = self.sums[key].least(self.costs.ranges.counts[fresh])
        seconds: Floats = known[numbers] + self.costs.sent(stage)
        return seconds


def _held(least: int, most: int) -> list[tuple[int, int]]:
    """Groups [first, last] of numbers from `least`; the last one has `most` in it."""
    groups: list[tuple[int, int]] = []
    first = min(least, most)
    while not groups or groups[-1][1] < most:
        size = 1 if len(groups) < ROUNDS else int(first * (GROW - 1)) + 1
        groups.append((first, min(most, first + size - 1)))
        first = groups[-1][1] + 1
    return groups


def _least_after(table: list[Floats]) -> list[Floats]:
    """[stage][place]: the least seconds of a micro-batch in the stages after, where the stage ends at that place."""
    places = len(table[0])
    at_end = np.full(places, _INF)
    at_end[-1] = 0.0
    after = [at_end]
    for stage_table in reversed(table[1:]):
        every, before = stage_table + after[0][:, None], np.full(places, _INF)
        end, length = np.nonzero(np.isfinite(every))
        np.minimum.at(before, end - length, every[end, length])
        after.insert(0, before)
    return after


def late_seconds(late: Sequence[float] | Floats, backward: Sequence[float] | Floats, beside: float) -> Floats:
    """Exposed seconds [k] of the first k blocks, exact if each has a collective; `beside`: part of what is hidden."""
    total, hidden = (np.concatenate([[0.0], np.cumsum(seconds)]) for seconds in (late, backward))
    exposed = np.concatenate([[0.0], np.maximum.accumulate(np.maximum(total[1:] - hidden[:-1], 0.0))])
    unhidden: Floats = exposed + min(beside, 1.0) * (total - exposed)
    return unhidden


def least_late(problem: StageProblem, places: Sequence[int]) -> Floats:
    """[end]: below that of the first stage, where it ends at so many of `places`, whatever points its blocks have: they
    hide most where they take longest. Of several chunks the first one's backward is the last."""
    fronts = [problem.fronts[kind] for kind in problem.line]
    first = problem.of_stage(0)  # whose backward is the last
    longest = [float(first[kind].backward_seconds.max()) for kind in problem.line]
    late = late_seconds([front.late_seconds for front in fronts], longest, problem.late_beside)
    ends = np.array(places)
    if problem.chunks > 1:
        start, stop = problem.run
        ends = np.minimum(ends, start) + np.maximum(np.minimum(ends, stop) - start, 0) // problem.chunks
    least: Floats = late[ends]
    return least
