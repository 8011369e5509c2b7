"""Every plan of a small stage problem: the oracle of the tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from autoshard.solvers.stages.range_costs import cut_places, parts_of
from autoshard.solvers.stages.stage_problem import Part, StagePlan, StageProblem, bytes_of, closed_form


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
