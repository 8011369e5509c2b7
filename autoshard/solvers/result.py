"""A choice becomes a Solution in one place: its objective and peak are always recomputed from the problem itself."""

from __future__ import annotations

import time
from collections.abc import Sequence

from autoshard.problem import Problem, Solution, memory, objective

TOLERANCE = 1e-9  # relative: below it an objective equals its bound (sums are rounded in different orders)


def finish(problem: Problem, choice: Sequence[int], lower_bound: float, solver: str, started: float) -> Solution:
    """`started` is a time.perf_counter(). A bound within rounding of the objective makes the status "optimal"."""
    picked = tuple(int(s) for s in choice)
    total = objective(problem, picked)
    closed = total - lower_bound <= TOLERANCE * max(abs(total), abs(lower_bound))
    return Solution(
        choice=picked,
        objective=total,
        lower_bound=total if closed else lower_bound,
        peak_bytes=peak(problem, picked),
        seconds=time.perf_counter() - started,
        solver=solver,
        status="optimal" if closed else "feasible",
    )


def peak(problem: Problem, choice: Sequence[int]) -> float:
    """The most bytes alive at any time; 0 for an empty horizon."""
    return float(memory(problem, choice).max(initial=0.0))
