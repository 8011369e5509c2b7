"""Every plan of a small stage problem, and a bound on the step of one: the oracles of the tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.solvers.stages.idle_bound import late_seconds
from autoshard.solvers.stages.range_costs import cut_places, parts_of
from autoshard.solvers.stages.stage_problem import (
    Part,
    StagePlan,
    StageProblem,
    bytes_of,
    closed_form,
    stage_seconds,
)


def every_plan(problem: StageProblem) -> Iterator[StagePlan]:
    """All that fit, in whatever way cuts and points may be chosen."""
    choices = [range(problem.fronts[kind].points) for kind in problem.line]
    for parts in _every_cut(problem):
        for points in itertools.product(*choices):
            if (bytes_of(problem, parts, points) <= problem.capacity_bytes).all():
                yield StagePlan(tuple(parts), points, closed_form(problem, parts, points))


def _every_cut(problem: StageProblem) -> Iterator[list[Part]]:
    places = cut_places(problem)
    if problem.chunks > 1 and (problem.run[1] - problem.run[0]) % problem.chunks:
        return
    for inner in itertools.combinations(places[1:-1], problem.stages - 1):
        parts = parts_of(problem, [0, *inner, places[-1]])
        allowed = np.ones((problem.stages, len(problem.line))) if problem.allowed is None else problem.allowed
        if all(allowed[p.stage, p.first : p.stop].all() for p in parts) and all(p.stop > p.first for p in parts):
            yield parts


def any_order_bound(problem: StageProblem, parts: Sequence[Part], points: Sequence[int]) -> float:
    """No order of undivided forwards and backwards ends this plan earlier.

    A stage has its first input after one micro-batch has passed the first chunk of every stage before it, then runs all
    of its own, and after its last backward the same chunks return, before the first stage's tail and what is left of
    its late collectives; or its own tail.
    """
    forward, backward, tail = stage_seconds(problem, parts, points)
    first, once = [part for part in parts if part.chunk == 0], problem.first_seconds
    passes, begun = np.zeros((2, problem.stages)), np.zeros(problem.stages)
    for part in parts:
        begun[part.stage] += once[part.stop] - once[part.first]
    for part in first:
        passes[0, part.stage] += once[part.stop] - once[part.first]
        for block in range(part.first, part.stop):
            front, point = problem.of_stage(part.stage)[problem.line[block]], points[block]
            passes[:, part.stage] += front.forward_seconds[point], front.backward_seconds[point]
        if problem.stages > 1:
            hands = part.stage < problem.stages - 1 or problem.chunks > 1, part.stage > 0
            passes[:, part.stage] += np.array(hands) * problem.send_seconds
    fronts = [(problem.of_stage(0)[problem.line[k]], points[k]) for k in range(first[0].first, first[0].stop)]
    late = [front.late_seconds for front, _ in fronts]
    tail[0] += late_seconds(late, [front.backward_seconds[point] for front, point in fronts], problem.late_beside)[-1]
    before = np.concatenate([np.zeros((2, 1)), passes.cumsum(axis=1)[:, :-1]], axis=1)
    busy = before[0] + begun + problem.micro_batches * (forward + backward)
    return float(np.maximum(busy + before[1] + tail[0], busy + tail).max())
