"""The least that the fullest stage can hold: a dynamic program over cuts, each block at its leanest point."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats
from autoshard.solvers.stages.range_costs import block_counts, cut_places
from autoshard.solvers.stages.stage_problem import StageProblem

_INF = float("inf")


def least_bytes(problem: StageProblem, beside: Floats) -> float:
    """Least bytes of the fullest stage, whatever its capacity; `beside[stage]` comes to its blocks' own. Infinite where
    no cut is allowed. Exact for `bytes_of` (stage_problem)."""
    places = cut_places(problem)
    counts = block_counts(problem.line, len(problem.fronts))[places]
    longer = np.arange(len(places))[:, None] > np.arange(len(places))[None, :]
    tops = sorted({float(w) for kind in {*problem.line} for w in problem.fronts[kind].working_bytes})
    fullest = np.where(np.arange(len(places)) == 0, 0.0, _INF)
    for stage in range(problem.stages):
        held = np.full(longer.shape, _INF)
        for top in tops:
            held = np.minimum(held, _held(problem, counts, stage, top))
        held = np.where(longer & _allowed(problem, places, stage), held + beside[stage], _INF)
        fullest = np.maximum(fullest[None, :], held).min(axis=1)
    return float(fullest[-1])


def _held(problem: StageProblem, counts: NDArray[np.int64], stage: int, top: float) -> Floats:
    """[end, begin]: of points that work with at most `top`, and that."""
    sizes = zip(problem.point_bytes(stage), problem.fronts, strict=True)
    least = np.array([own[front.working_bytes <= top].min(initial=_INF) for own, front in sizes])
    none = counts @ np.isinf(least)
    own = counts @ np.where(np.isinf(least), 0.0, least)
    found: Floats = np.where(none[:, None] == none[None, :], own[:, None] - own[None, :] + top, _INF)
    return found


def _allowed(problem: StageProblem, places: list[int], stage: int) -> NDArray[np.bool_]:
    if problem.allowed is None:
        return np.ones((len(places),) * 2, bool)
    out = np.concatenate([[0], np.cumsum(~problem.allowed[stage])])[places]
    found: NDArray[np.bool_] = out[:, None] == out[None, :]
    return found
