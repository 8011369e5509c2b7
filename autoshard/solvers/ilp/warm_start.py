"""Plans that are known at once: what a search begins with under a clock, and what it has where that was too short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Problem
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.infeasibility import none_fits
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.memory_repair import repaired
from autoshard.solvers.common.solver_options import Clock, Options
from autoshard.solvers.heuristics import bisection
from autoshard.solvers.heuristics.propagation import propagate


def known(state: Incumbent) -> None:
    """The plan that propagates from the costliest nodes; nothing where its choices exclude each other or don't fit.

    Raises InfeasibleError where it is proven that there is no plan.
    """
    _tried(state, lambda: propagate(state.problem, {}).choice)


def something(state: Incumbent) -> None:
    """A plan, whatever time that takes: in proportion to the nodes. Raises InfeasibleError where none is found."""
    for make in _ways(state):
        _tried(state, make)
        if state.choice is not None:
            return
    raise state.error or none_fits(state.problem, False)


def plan(problem: Problem) -> Choice:
    """The same, where nothing is known of the problem yet."""
    state = Incumbent(problem)
    something(state)
    assert state.choice is not None
    return state.choice


def _ways(state: Incumbent) -> Iterator[Callable[[], Choice | None]]:
    problem, near, clock = state.problem, state.near, Clock()
    spread = cache(lambda: propagate(problem, {}).choice)
    clock.stop()
    if near is not None:
        yield lambda: repaired(problem, near)
    yield lambda: tuple(int(np.lexsort((node.bytes, node.seconds))[0]) for node in problem.nodes)  # each its quickest
    yield lambda: tuple(int(np.lexsort((node.seconds, node.bytes))[0]) for node in problem.nodes)  # or its smallest
    yield spread
    yield lambda: repaired(problem, spread())
    yield lambda: bisection.solve(problem, Options(clock=clock)).choice


def _tried(state: Incumbent, make: Callable[[], Choice | None]) -> None:
    try:
        state.offer(attempt(make))
    except InfeasibleError as error:
        state.failed(error)
