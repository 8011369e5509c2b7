"""The solver of the contest: exact elimination where that is quick, else `anytime`."""

from __future__ import annotations

from autoshard.errors import UserError
from autoshard.ir.problem import Problem
from autoshard.solvers import Clock, Options, audited, solve
from autoshard.solvers.common.result import Solution
from autoshard.solvers.common.solver_options import PartialClock
from benchmarks.contest import anytime, quadratise

_TRIAL = 0.03  # of the time, for exact elimination where contraction leaves much


def contested(problem: Problem, clock: Clock) -> Solution:
    """Exact elimination where a small part of the time is enough for it, else the search of this folder."""
    if not quadratise.suits(problem):
        try:
            found = solve(problem, "dp", Options(clock=PartialClock(_TRIAL * clock.left, whole=clock)))
        except UserError:
            found = None
        if found is not None and not found.cut and found.gap == 0:
            return found
    found = anytime.solve(problem, clock)
    return audited(problem, found.choice, found, clock.cut)
