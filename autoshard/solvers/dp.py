"""Exact min-plus elimination of the strategy graph, and the ladder below it where the exact tables are too large.

1. Reduce the domains, write the values as layout-level terms, pick the cheaper of a few elimination orders: exact.
2. Where a value does not fit the budget: a relaxation (shares) gives the lower bound, and improve.py the plan. The
   status is then "feasible" with its gap, unless the two meet.
3. Where no order fits: messages, fewer choices, and exact tables without the hubs (hubs.py); else mini-buckets.
A plan above the memory capacity goes on to lagrangian.py. Large problems of fenced pairs, as other compilers export
them, go to anytime.py. Nodes of hundreds of choices take seconds: under a time limit quick.py has a plan first.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from autoshard.errors import InfeasibleError
from autoshard.problem import Problem, objective
from autoshard.solvers import anytime, hubs, quick
from autoshard.solvers.improve import improved
from autoshard.solvers.lagrangian import fitted
from autoshard.solvers.minimise import BUDGET_ENTRIES, Minimum, minimise, minimum_within
from autoshard.solvers.options import Clock
from autoshard.solvers.quick import Quick
from autoshard.solvers.result import Solution, finish
from autoshard.solvers.tables import Contents
from autoshard.solvers.watch import OutOfTime, check, watched

_LOOSE = 1e-3  # relative gap that is worth more work
_ENTRIES_PER_SECOND = 20_000_000  # of the time limit: tables that are made in about that time


def solve(
    problem: Problem, *, budget_entries: int = BUDGET_ENTRIES, clock: Clock | None = None, rough: bool = False
) -> Solution:
    """The fastest plan within the memory capacity, with a lower bound; the best so far when the clock is over.

    `rough`: where that takes long, a good plan, and quickly. Raises InfeasibleError where no choice is allowed or none
    fits (the message says whether that is proven).
    """
    started = time.perf_counter()
    clock = clock or Clock()
    if anytime.suits(problem):
        return anytime.solve(problem, clock)
    if not quick.suits(problem):
        return _within(problem, budget_entries, clock)
    known = Quick(problem, lambda part: _within(part, budget_entries, Clock(max(clock.left, 1.0), timer=clock.timer)))
    limited = math.isfinite(clock.limit_seconds)
    first = known.solution() if rough or limited else None
    if first is not None and rough:
        return first
    try:
        with watched(clock):
            check(quick.exact_work(problem))
            return _solved(problem, budget_entries, clock)
    except OutOfTime:
        clock.cut = True
        first = first or known.solution()
        return finish(problem, first.choice, known.climb(first.objective, clock), "dp", started)


def _within(problem: Problem, budget: int, clock: Clock) -> Solution:
    """By tables that are made in the time that is left."""
    if math.isfinite(clock.limit_seconds):
        budget = int(min(budget, _ENTRIES_PER_SECOND * clock.left))
    return _solved(problem, budget, clock)


def _solved(problem: Problem, budget: int, clock: Clock) -> Solution:
    started = time.perf_counter()
    contents = Contents(problem)
    found = minimum_within(problem, contents, budget_entries=budget)
    if found is None:
        found = _bounded(problem, contents, budget, clock)
    else:
        found = improved(problem, contents, found, budget, clock)
    if math.isinf(problem.capacity_bytes):
        return finish(problem, found.choice, found.bound, "dp", started)
    return fitted(problem, found, budget, started, clock)


def _bounded(problem: Problem, contents: Contents, budget: int, clock: Clock) -> Minimum:
    """Where no exact tables fit: by messages, and where these leave a gap by mini-buckets too."""
    near = hubs.bounded(problem, budget, clock)
    if near is not None and (clock.over or objective(problem, near.choice) - near.bound <= _LOOSE * abs(near.bound)):
        return near
    try:
        found = improved(problem, contents, minimise(problem, contents, budget_entries=budget), budget, clock)
    except InfeasibleError:
        if near is None:
            raise
        return near
    if near is None:
        return found
    choice = min(near.choice, found.choice, key=lambda choice: objective(problem, choice))
    return replace(found, bound=max(near.bound, found.bound), choice=choice)
