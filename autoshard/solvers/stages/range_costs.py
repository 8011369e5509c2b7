"""The least seconds of every range of the line on every stage, and the points of its blocks there."""

from __future__ import annotations

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.solvers.stages.block_sums import BlockSums, Counts, point_bytes
from autoshard.solvers.stages.stage_problem import Part, StageProblem

_INF = float("inf")


class RangeCosts:
    """Of one way to count a point: `share` of its micro-batch's seconds and sends, and `tail` times its tail.

    Ranges begin and end where cuts may be (`places`, positions in the line, first and last with them); on each stage
    they are tables by (place of the end, how many places it is long).
    """

    def __init__(self, problem: StageProblem, share: float, tail: float) -> None:
        self.problem, self.share = problem, share
        self.places = cut_places(problem)
        costs = [share * front.seconds + tail * front.tail_seconds for front in problem.fronts]
        self.sums = [
            BlockSums(
                costs,
                [point_bytes(front, float(problem.live[s])) for front in problem.fronts],
                [front.working_bytes for front in problem.fronts],
                float(problem.capacity_bytes[s]),
            )
            for s in range(problem.stages)
        ]
        counts = np.zeros((len(problem.line) + 1, len(problem.fronts)), dtype=np.int64)
        for block, kind in enumerate(problem.line):
            counts[block + 1] = counts[block]
            counts[block + 1, kind] += 1
        self.counts = counts
        self.line_least = counts @ np.array([cost.min(initial=_INF) for cost in costs])

    def sent(self, stage: int) -> float:
        return self.share * self.problem.send_seconds * sum(self.problem.sends(stage))

    def least(self, stage: int, start: int, stop: int) -> float:
        """Of blocks [start, stop), infinite where they don't fit or may not be there."""
        allowed = self.problem.allowed
        if allowed is not None and not allowed[stage, start:stop].all():
            return _INF
        return self.sums[stage].least(self._counts(start, stop)) + self.sent(stage)

    def points(self, stage: int, start: int, stop: int) -> list[list[int]]:
        return self.sums[stage].points(self._counts(start, stop))

    def _counts(self, start: int, stop: int) -> Counts:
        return tuple(int(n) for n in self.counts[stop] - self.counts[start])

    def table(self, most: float) -> list[Floats]:
        """[stage][end, length in places]: ranges that may take at most `most`; the others are infinite."""
        places, stages = self.places, self.problem.stages
        least = self.line_least[places]
        longest = max(
            int(np.searchsorted(least, least[i] + most * (1 + 1e-12), side="right")) - 1 - i for i in range(len(places))
        )
        found = []
        for stage in range(stages):
            own = np.full((len(places), max(longest, 0) + 1), _INF)
            first = [0] if stage == 0 else range(stage, len(places) - 1)
            for begin in first:
                final = len(places) - (stages - stage - 1)  # every later stage takes a place
                last = range(final - 1 if stage == stages - 1 else begin + 1, final)
                for end in last:
                    if end - begin > longest or least[end] - least[begin] > most * (1 + 1e-12):
                        break
                    cost = self.least(stage, places[begin], places[end])
                    own[end, end - begin] = cost if cost <= most * (1 + 1e-12) else _INF
            found.append(own)
        return found


def cut_places(problem: StageProblem) -> list[int]:
    """Where stages may begin and end. With several chunks each takes as much of the run of equal blocks as the others:
    what stands before the run is the first part's, what stands after it the last part's."""
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
    found: list[Part] = []
    for chunk in range(problem.chunks):
        for stage in range(problem.stages):
            first = position
            position = (start if not found else first) + each[stage]
            found.append(Part(stage, chunk, first, position))
    found[-1] = Part(problem.stages - 1, problem.chunks - 1, found[-1].first, len(problem.line))
    return found
