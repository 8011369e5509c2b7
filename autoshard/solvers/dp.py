"""Exact min-plus elimination of the strategy graph, and the ladder below it where the exact tables are too large.

1. Reduce the domains, write the values as layout-level terms, pick the cheaper of a few elimination orders: exact.
2. Where a value or the order does not fit the budget: a relaxation (shares, mini-buckets) gives the lower bound, and
   improve.py the plan. The status is then "feasible" with its gap, unless the two meet.
A plan above the memory capacity goes on to lagrangian.py.
"""

from __future__ import annotations

import time

from autoshard.problem import Problem, Solution
from autoshard.solvers.improve import improved
from autoshard.solvers.lagrangian import fitted
from autoshard.solvers.minimise import BUDGET_ENTRIES, minimise
from autoshard.solvers.tables import Contents


def solve(problem: Problem, *, budget_entries: int = BUDGET_ENTRIES) -> Solution:
    """The fastest plan within the memory capacity, with a lower bound.

    Raises InfeasibleError where no choice is allowed or none fits (the message says whether that is proven).
    """
    started = time.perf_counter()
    contents = Contents(problem)
    found = improved(problem, contents, minimise(problem, contents, budget_entries=budget_entries), budget_entries)
    return fitted(problem, found, budget_entries, started)
