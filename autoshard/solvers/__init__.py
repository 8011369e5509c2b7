"""Solvers of the strategy-selection problem: `solve(problem, solver) -> Solution`. numpy only."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.errors import UsageError
from autoshard.problem import Problem, Solution
from autoshard.solvers import dp, exhaustive
from autoshard.solvers.minimise import BUDGET_ENTRIES
from autoshard.solvers.options import Clock, Options

__all__ = ["SOLVERS", "Clock", "Options", "solve"]

SOLVERS: dict[str, Callable[[Problem, Options], Solution]] = {
    "dp": lambda problem, options: dp.solve(problem, budget_entries=options.budget_entries or BUDGET_ENTRIES),
    "exhaustive": lambda problem, options: exhaustive.solve(problem),
}


def solve(problem: Problem, solver: str = "dp", options: Options | None = None) -> Solution:
    """Raises UsageError that lists the known solvers, InfeasibleError where no plan exists or fits."""
    if solver not in SOLVERS:
        raise UsageError(f"unknown solver {solver!r}: expected one of {', '.join(sorted(SOLVERS))}")
    return SOLVERS[solver](problem, options or Options())
