"""The solver of the contest: exact elimination where that is quick, else `anytime`."""

from __future__ import annotations

import numpy as np

from autoshard.errors import UserError
from autoshard.ir.problem import Problem
from autoshard.solvers import Clock, Options, audited, solve
from autoshard.solvers.common.result import OPTIMAL, Solution
from autoshard.solvers.common.solver_options import PartialClock
from benchmarks.contest import anytime

_LARGE = 500  # nodes: below, elimination is tried at once
_TRIAL = 0.03  # of the time, for exact elimination where contraction leaves much


def contested(problem: Problem, clock: Clock) -> Solution:
    """Exact elimination where a small part of the time is enough for it, else the search of this folder."""
    if not worthwhile(problem):
        try:
            found = solve(problem, "dp", Options(clock=PartialClock(_TRIAL * clock.left, whole=clock)))
        except UserError:
            found = None
        if found is not None and found.status == OPTIMAL:
            return found
    found = anytime.solve(problem, clock)
    return audited(problem, found.choice, found, clock.cut)


def worthwhile(problem: Problem) -> bool:
    """Whether contraction will make a large problem small: most of its values are fenced."""
    if len(problem.nodes) < _LARGE:
        return False
    known: dict[int, bool] = {}
    for value in problem.values:
        if id(value.seconds) not in known:
            known[id(value.seconds)] = bool(np.isinf(value.seconds).any())
    return sum(known[id(value.seconds)] for value in problem.values) > len(problem.values) / 8
