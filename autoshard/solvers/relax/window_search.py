"""Below exact elimination: better bounds by shifting shares, better plans by solving one window of nodes at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem, objective
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.local_search import Aim, Choice, descend, line, links
from autoshard.solvers.common.result import TOLERANCE
from autoshard.solvers.common.solver_options import Clock
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import Minimum, minimise

_SHIFTS = 3  # rounds of shifting shares
_WINDOWS = 12  # windows per pass
_PASSES = 3
_MOST_WORK = 1_000_000_000  # joint entries of all windows: a count, so that plans don't depend on the clock
_WINDOW_ENTRIES = 2_000_000  # the budget of one window
NEAR = 1e-4  # relative gap that is not worth more work


def improved(problem: Problem, contents: Contents, found: Minimum, budget: int, clock: Clock | None = None) -> Minimum:
    """`found` itself where it is exact; else a bound at least as high and a choice at least as good.

    Raises InfeasibleError where no finite choice is found (it says that this is not proven).
    """
    if found.exact:
        return found
    clock = clock or Clock()
    bound, best = found.bound, polished(problem, found.choice)
    shifted = _shifted(problem, contents, found, budget)
    while not (clock.over or _near(objective(problem, best), bound)):
        again = attempt(next, shifted, None)
        if again is None:
            break
        bound = max(bound, again[1])
        best = min(best, polished(problem, again[0]), key=lambda c: objective(problem, c))
    best = windows(problem, contents, best, budget, bound, clock)
    if math.isinf(objective(problem, best)):
        raise InfeasibleError(
            "no allowed combination of strategies was found; that there is none is not proven", proven=False
        )
    return replace(found, bound=bound, choice=best)


def _near(value: float, bound: float) -> bool:
    return value - bound <= NEAR * abs(bound)


def polished(problem: Problem, choice: Choice) -> Choice:
    """Descent on the objective, with forbidden entries as very expensive ones while `choice` uses some."""
    if math.isinf(objective(problem, choice)):
        softer = softened(problem)
        choice = descend(softer, links(softer), choice, Aim(1.0, 0.0, math.inf))
    return descend(problem, links(problem), choice, Aim(1.0, 0.0, math.inf))


def softened(problem: Problem) -> Problem:
    """Forbidden entries made finite, each more expensive than everything else together."""
    tables = [node.seconds for node in problem.nodes] + [value.seconds for value in problem.values]
    penalty = 1.0 + 2.0 * sum(float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) * max(t.shape) for t in tables)

    def soft(table: Floats) -> Floats:
        return np.where(np.isinf(table), penalty, table)

    return replace(
        problem,
        nodes=tuple(replace(node, seconds=soft(node.seconds)) for node in problem.nodes),
        values=tuple(replace(value, seconds=soft(value.seconds)) for value in problem.values),
    )


def _shifted(problem: Problem, contents: Contents, found: Minimum, budget: int) -> Iterator[tuple[Choice, float]]:
    """Choices and bounds after moving shares of a target towards the consumers that use it together."""
    shares = {v: np.full((len(problem.values[v].consumers), len(problem.values[v].bytes)), 0.0) for v in found.relaxed}
    for v in shares:
        shares[v] += 1.0 / len(shares[v])
    choice = found.choice
    for round_ in range(_SHIFTS if found.relaxed else 0):
        shares = {v: _shift(problem, v, shares[v], choice, 1.0 / (round_ + 2)) for v in shares}
        again = minimise(problem, contents, shares=shares, budget_entries=budget)
        yield again.choice, again.bound
        choice = again.choice


def _shift(problem: Problem, v: int, shares: Floats, choice: Choice, step: float) -> Floats:
    """Shares part of the way to an even split among the consumers that chose a target; each column still sums to 1."""
    value = problem.values[v]
    wanted = shares.copy()
    chosen = np.array([int(t[choice[c]]) for c, t in zip(value.consumers, value.targets, strict=True)])
    for target in np.unique(chosen):
        users = chosen == target
        wanted[:, target] = users / users.sum()
    return np.asarray(shares + step * (wanted - shares))


def windows(problem: Problem, contents: Contents, choice: Choice, budget: int, bound: float, clock: Clock) -> Choice:
    """Frees one window of nodes at a time, fixes the rest, and solves that; keeps what is better.

    Ends after `_MOST_WORK`, or when the choice is near the lower bound `bound`.
    """
    if math.isinf(objective(problem, choice)):
        return choice
    best, value = choice, objective(problem, choice)
    width = max(2, 2 * len(choice) // _WINDOWS)
    budget, work = min(budget, _WINDOW_ENTRIES), 0
    for _ in range(_PASSES):
        before = value
        for low in range(0, len(choice), max(1, width // 2)):
            if clock.over or _near(value, bound) or work > _MOST_WORK:
                return best
            free = window(problem, best, low, width)
            again = attempt(minimise, problem, contents, allowed=free, budget_entries=budget)
            if again is None:
                return best
            work += again.work
            if objective(problem, again.choice) < value:
                best, value = again.choice, objective(problem, again.choice)
        if value >= before * (1 - TOLERANCE):
            width = max(2, width // 2)
    return best


def window(problem: Problem, choice: Choice, low: int, width: int) -> Sequence[Integers]:
    """Everything allowed for `width` nodes from place `low` of the line, only `choice` for the others."""
    free = set(line(problem)[low : low + width])
    return [np.arange(len(n.seconds)) if i in free else np.array([choice[i]]) for i, n in enumerate(problem.nodes)]
