"""Checks that no plan is allowed, or none fits: an argument of another kind than the solver's has to show it.

A solver's claim is checked here, and nowhere else, by the first of these that confirms it, the cheap ones first:

- at some time the smallest sizes of all that is alive are above the capacity;
- arc consistency leaves a node without a choice;
- every combination was tried, where these are few;
- of the integer programs' claims: elimination's bound on every peak is above the capacity, or it finds none allowed;
- of all others: with prices p >= 0 of bytes that add up to 1, a linear program's bound on what every plan pays,

      min over plans of sum_t p_t M_t(plan) <= min over plans of max_t M_t(plan),

  is above the capacity; the bound is made of dual prices, whatever their rounding (`highs_engine.Relaxed`).

A time of its own ends the last two. Implemented in `checked` and what stands below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import SLAB, Floats, Problem, Value
from autoshard.solvers.common.arc_consistency import Fences
from autoshard.solvers.common.clock import Pace, attempt, watched
from autoshard.solvers.common.infeasibility import least
from autoshard.solvers.common.result import none_within
from autoshard.solvers.common.solver_options import Clock, PartialClock
from autoshard.solvers.elimination.weighted_sum import Additive, additive, charge
from autoshard.solvers.heuristics import brute_force
from autoshard.solvers.relax.low_memory_plans import minimum_memory_bound
from autoshard.solvers.relax.memory_columns import condensed

_SECONDS = 5.0  # for one check
_COLUMNS = 100_000  # choices and pairs of layouts of a linear program


def checked(problem: Problem, claim: InfeasibleError, solver: str, clock: Clock) -> InfeasibleError:
    """`claim` of a solver about `problem` if an argument shows it, else one that states that it is not proven."""
    if not claim.proven or solver == "exhaustive":  # which is such an argument
        return claim
    part_clock = PartialClock(min(_SECONDS, clock.left), whole=clock)
    arguments = (_smallest, _alone, _counted, _by_tables if solver == "ilp" else _by_program)
    with watched(part_clock):
        if any(attempt(_shows, argument, problem, claim, part_clock) for argument in arguments):
            return claim
    message = (
        f"no plan was found that is allowed and fits, which is not proven: one method alone says so ({claim.message})"
    )
    return InfeasibleError(message, claim.hint, proven=False)


Argument = Callable[[Problem, InfeasibleError, Clock], bool]


def _shows(argument: Argument, problem: Problem, claim: InfeasibleError, clock: Clock) -> bool:
    """True if the argument confirms the claim; solvers report by an error that they found no plan."""
    try:
        return argument(problem, claim, clock)
    except InfeasibleError as error:
        return error.proven


def _smallest(problem: Problem, claim: InfeasibleError, clock: Clock) -> bool:
    return none_within(least(problem).bytes, problem.capacity_bytes)


def _alone(problem: Problem, claim: InfeasibleError, clock: Clock) -> bool:
    Fences(problem)
    return False


def _counted(problem: Problem, claim: InfeasibleError, clock: Clock) -> bool:
    if math.prod(len(node.seconds) for node in problem.nodes) <= SLAB:
        brute_force.solve(problem)
    return False


def _by_tables(problem: Problem, claim: InfeasibleError, clock: Clock) -> bool:
    return none_within(minimum_memory_bound(problem), problem.capacity_bytes)


def _by_program(problem: Problem, claim: InfeasibleError, clock: Clock) -> bool:
    """Check by the prices of the claim, if it has some; else at the time that the smallest sizes fill most."""
    from autoshard.solvers.linear_program.highs_engine import Highs
    from autoshard.solvers.linear_program.rows import linear

    small = condensed(problem)
    prices = getattr(claim, "prices", None)
    if prices is None or len(prices) != small.horizon or not prices.sum() > 0:
        prices = np.zeros(small.horizon)
        prices[least(small).time] = 1.0
    pace, sum_ = Pace(2), priced(small, prices / prices.sum())
    choices = [np.flatnonzero(flags) for flags in Fences(sum_).flags]
    if sum(map(len, choices)) + sum(v.seconds.size * len(v.consumers) for v in sum_.values) > _COLUMNS:
        return False
    typical = problem.capacity_bytes if 0 < problem.capacity_bytes < math.inf else 1.0
    program = Highs(linear(sum_, choices), clock, typical, pace)
    relaxed = program.relax()
    if relaxed is None:
        return program.infeasible
    return none_within(relaxed.bound, problem.capacity_bytes)


# --- bytes at prices, as a sum --------------------------------------------------------------------------------------


def priced(problem: Problem, prices: Floats) -> Problem:
    """A problem without memory whose objective is at most sum over times of prices x bytes, under every choice, and
    whose forbidden entries are those of `problem`."""
    sum_ = additive(problem, prices, 0.0)
    nodes = tuple(
        replace(node, seconds=np.where(np.isinf(node.seconds), np.inf, charge(sum_, node.interval) * node.bytes))
        for node in problem.nodes
    )
    values = tuple(part for value in problem.values for part in _parts(value, sum_))
    return Problem(nodes, values, horizon=problem.horizon)


def _parts(value: Value, sum_: Additive) -> Iterator[Value]:
    """Values that a value splits into. A kept layout costs what its costliest keeper does: each step between their
    charges is a value of the keepers that reach it. The span of several is at least that of each."""
    charges = [charge(sum_, interval) for interval in value.intervals]
    forbidden = np.isinf(value.seconds)
    if forbidden.any():
        for i in range(len(value.consumers)):
            yield _part(value, [i], np.where(forbidden, np.inf, 0.0))
    below = 0.0
    for step in sorted({cost for cost in charges if cost > 0}):
        keepers = [i for i, cost in enumerate(charges) if cost >= step]
        yield _part(value, keepers, np.broadcast_to((step - below) * value.bytes, value.seconds.shape))
        below = step


def _part(value: Value, consumers: list[int], seconds: Floats) -> Value:
    return replace(
        value,
        consumers=tuple(value.consumers[i] for i in consumers),
        targets=tuple(value.targets[i] for i in consumers),
        seconds=np.array(seconds),
        bytes=value.bytes * 0.0,
        intervals=tuple((0, 0) for _ in consumers),
    )
