"""Solvers of the strategy-selection problem: `solve(problem, solver) -> Solution`. numpy only."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.errors import UsageError
from autoshard.problem import Problem, Solution
from autoshard.solvers import dp, exhaustive

SOLVERS: dict[str, Callable[[Problem], Solution]] = {"dp": dp.solve, "exhaustive": exhaustive.solve}


def solve(problem: Problem, solver: str = "dp") -> Solution:
    """Raises UsageError that lists the known solvers, InfeasibleError where no plan exists or fits."""
    if solver not in SOLVERS:
        raise UsageError(f"unknown solver {solver!r}: expected one of {', '.join(sorted(SOLVERS))}")
    return SOLVERS[solver](problem)
