"""Presolve of an integer program, whoever solves it: a first plan, the choices worth keeping, times to limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.effort import ROUNDS, SOON_ENTRIES
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.solver_options import Options
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.dominance import finite, reduce
from autoshard.solvers.elimination.minimise import minimise
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax.limited_search import fitted
from autoshard.units import ROUNDING, format_bytes


class Start(NamedTuple):
    """A plan of dp, or None; its bound; and its prices of memory, seconds a byte over time."""

    choice: Choice | None
    bound: float
    prices: Floats


def starting_plan(problem: Problem, options: Options) -> Start:
    """Plan, bound and prices that dp finds within a small budget, and until the clock is over.

    `problem` is on condensed times. Raises InfeasibleError if it is proven that there is no plan.
    """
    budget = min(options.budget_entries or SOON_ENTRIES, SOON_ENTRIES)
    state, prices = Incumbent(problem), None
    try:
        minimum = attempt(minimise, problem, Contents(problem), budget_entries=budget)
        prices = None if minimum is None else attempt(fitted, state, minimum, budget)
    except InfeasibleError as error:
        state.failed(error)
    return Start(state.choice, state.bound, np.zeros(problem.horizon) if prices is None else prices)


def worth_keeping(problem: Problem) -> list[Integers]:
    """The choices of each node among which an optimum is. Raises InfeasibleError where a node has none."""
    if math.isinf(problem.capacity_bytes):
        return reduce(additive(problem), Contents(problem))
    return finite(problem)


def overflows(problem: Problem, alive: Floats, known: Sequence[int]) -> list[int]:
    """Times that are not `known` at which more is alive than fits: the worst of each window, the worst first."""
    excess = alive - problem.capacity_bytes * (1 + ROUNDING)
    padded = np.concatenate([[-np.inf], excess, [-np.inf]])
    peak = (excess > 0) & (excess >= padded[:-2]) & (excess > padded[2:])
    peak[list(known)] = False
    times = np.flatnonzero(peak)
    return [int(t) for t in times[np.argsort(-excess[times], kind="stable")][:ROUNDS]]


def infeasible(problem: Problem, *, proven: bool) -> InfeasibleError:
    capacity = format_bytes(problem.capacity_bytes)
    if not proven:
        return InfeasibleError(
            f"no plan found that fits the capacity of {capacity}, which is not proven: the search was cut short",
            "a longer --time-limit, more devices, or a smaller batch",
            proven=False,
        )
    if math.isinf(problem.capacity_bytes):
        return InfeasibleError("every combination of strategies is forbidden: no strategies of all nodes go together")
    return InfeasibleError(
        f"no plan fits the capacity of {capacity}: every combination of strategies is excluded",
        "more devices, a smaller batch, or a leaner optimizer",
    )
