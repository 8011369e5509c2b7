"""The memory limit: multipliers on the binding times, found by column generation over unlimited solves.

With c(x) the seconds of a plan, m_t(x) its bytes at time t, C the capacity and multipliers p_t >= 0 in seconds a byte:

    L(p) = min_x c(x) + sum_t p_t (m_t(x) - C)  <=  min { c(x) : m_t(x) <= C for all t }

- One unlimited solve gives L(p), a valid bound, and a plan (a column). Implemented in `minimise.minimise`.
- p is the dual of the best mixture of the columns k seen so far: minimise sum_k w_k c_k with sum_k w_k m_tk <= C and
  sum_k w_k = 1, on the times t that bind; a time is added where the mixture overflows. Implemented in
  `memory_columns.master_prices` and `restricted_master.mixture`; both in turn, until L(p) meets the value of the
  mixture, in `lagrangian._seconds_dual`.
- The least peak of memory is bounded likewise, with c = 0 and C = 0: max over p, sum_t p_t <= 1, of min_x sum_t p_t
  m_t(x). Implemented in `memory_columns.memory_dual`.
- A peak lies just before a stop that follows a start: no other time needs a p_t. Implemented in
  `memory_columns.condensed`.
- The best plan that fits is improved by cutting between plans and by local search on the true memory. Implemented in
  `lagrangian._best`; and by solving one window of nodes at a time, in `lagrangian._stretched`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Problem
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.infeasibility import short
from autoshard.solvers.common.local_search import Aim, Choice, descend, links, mixtures
from autoshard.solvers.common.result import fits, none_within
from autoshard.solvers.common.solver_options import Clock
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import Minimum, minimise
from autoshard.solvers.relax.memory_columns import (
    CLOSED,
    PENALTY,
    ROUNDS,
    Column,
    Dual,
    column_of,
    master_prices,
    memory_dual,
)
from autoshard.solvers.relax.window_search import window
from autoshard.units import format_bytes

_STARTS = 4  # plans that local search starts from
_WINDOWS = 12  # windows of nodes that are solved again, half of each overlapping the next
_STRENGTHS = (0.0, 0.7, 1.2)  # times the multipliers
_MOST_WORK = 3_000_000_000  # joint entries, for all windows together
_NEAR = 2e-3  # relative gap that is not worth more work


def priced_fit(problem: Problem, free: Minimum, budget: int, clock: Clock | None = None) -> tuple[Choice, Dual]:
    """A plan within the capacity, and the prices of memory behind its bound; `problem` is on condensed times.

    `free` is the minimum without the capacity. Raises InfeasibleError: proven with the shortfall in bytes, or said to
    be unproven.
    """
    clock = clock or Clock()
    first = column_of(problem, free.choice)
    if fits(first.peak, problem.capacity_bytes):
        return free.choice, Dual(free.bound, np.zeros(problem.horizon), (first,))
    dual = _seconds_dual(problem, first, free.bound, budget, clock)
    choice = _best(problem, dual.columns)
    if choice is None:
        choice = _squeezed(problem, dual.columns, budget)
    return _stretched(problem, choice, dual, budget, clock), dual


def _seconds_dual(problem: Problem, first: Column, bound: float, budget: int, clock: Clock) -> Dual:
    """The largest minimum of seconds + multipliers . (bytes - capacity); `bound` is known already."""
    contents, columns = Contents(problem), [first]
    scale, capacity, unit = abs(first.seconds) or 1.0, problem.capacity_bytes, problem.capacity_bytes or 1.0
    times = [int(np.argmax(first.bytes))]
    best = np.zeros(problem.horizon)
    for _ in range(ROUNDS):
        if clock.over:
            break
        prices, value = master_prices(columns, times, 1.0 / scale, capacity, unit, PENALTY)
        multipliers = np.zeros(problem.horizon)
        multipliers[times] = prices
        multipliers *= scale / unit
        found = attempt(minimise, problem, contents, multipliers=multipliers, budget_entries=budget)
        if found is None:
            break
        reached = found.bound - float(multipliers.sum()) * capacity
        if reached > bound:
            bound, best = reached, multipliers
        known = any(found.choice == column.choice for column in columns)
        if known or value * scale - bound <= CLOSED * abs(bound):
            break
        columns.append(column_of(problem, found.choice))
    return Dual(bound, best, tuple(columns))


def _best(problem: Problem, columns: Sequence[Column]) -> Choice | None:
    """The fastest plan within the capacity that is reached from these; None where none is."""
    capacity = problem.capacity_bytes
    linked = links(problem)
    finite = [column for column in columns if math.isfinite(column.seconds)]
    aim = _aim(problem, finite)
    light = sorted((c for c in finite if not fits(c.peak, capacity)), key=lambda c: (c.peak, c.seconds))[:_STARTS]
    tried = [column_of(problem, descend(problem, linked, column.choice, aim)) for column in light]
    fitting = [column for column in (*finite, *tried) if fits(column.peak, capacity)]
    if not fitting:
        return None
    fitting.sort(key=lambda c: c.seconds)
    pairs = [(fit, heavy) for fit in fitting[:2] for heavy in sorted(light, key=lambda c: c.seconds)]
    mixed = [
        column_of(problem, choice) for fit, heavy in pairs for choice in mixtures(problem, fit.choice, heavy.choice)
    ]
    fitting.extend(column for column in mixed if fits(column.peak, capacity))
    fitting.sort(key=lambda c: c.seconds)
    polished = [column_of(problem, descend(problem, linked, column.choice, aim)) for column in fitting[:_STARTS]]
    return min((c for c in (*polished, *fitting) if fits(c.peak, capacity)), key=lambda c: c.seconds).choice


def _stretched(problem: Problem, choice: Choice, dual: Dual, budget: int, clock: Clock) -> Choice:
    """Frees one window of nodes at a time, around every place, and solves it under weaker and stronger multipliers."""
    contents = Contents(problem)
    best = column_of(problem, choice)
    width = max(2, 2 * len(choice) // _WINDOWS)
    work = 0
    for low in range(0, len(choice), max(1, width // 2)):
        if best.seconds - dual.bound <= _NEAR * abs(dual.bound) or work > _MOST_WORK or clock.over:
            break
        free = window(problem, best.choice, low, width)
        for strength in _STRENGTHS:
            prices = strength * dual.multipliers
            found = attempt(minimise, problem, contents, multipliers=prices, allowed=free, budget_entries=budget)
            if found is None:
                return best.choice
            work += found.work
            column = column_of(problem, found.choice)
            if fits(column.peak, problem.capacity_bytes) and column.seconds < best.seconds:
                best = column
    return best.choice


def _aim(problem: Problem, columns: Iterable[Column]) -> Aim:
    """Seconds, with overflow so expensive that no saving of time pays for it."""
    most = max((abs(column.seconds) for column in columns), default=1.0) or 1.0
    return Aim(1.0, PENALTY * most / max(problem.capacity_bytes, 1.0), problem.capacity_bytes)


def _squeezed(problem: Problem, columns: Sequence[Column], budget: int) -> Choice:
    """A plan that fits, by minimising memory alone; raises InfeasibleError where there is none, or none is found."""
    capacity = problem.capacity_bytes
    lightest = min(columns, key=lambda column: column.peak)
    dual = memory_dual(problem, lightest, budget)
    if none_within(dual.bound, capacity):
        raise short(problem, dual.bound - capacity, dual.multipliers)
    lean = _lean(problem, (*dual.columns, *columns), capacity)
    choice = _best(problem, lean)
    if choice is None:
        best = min(column.peak for column in lean)
        raise InfeasibleError(
            f"no plan found that fits, which is not proven: the smallest peak found is {format_bytes(best)}, the "
            f"capacity {format_bytes(capacity)}, and no plan needs less than {format_bytes(dual.bound)}",
            "more devices, a smaller batch, or a leaner optimizer",
            proven=False,
        )
    return choice


def _lean(problem: Problem, columns: Iterable[Column], enough: float) -> list[Column]:
    """The leanest of these; where none has a peak of `enough` or less, also of what is cut together from them, and
    what local search on memory alone makes of those."""
    every = sorted({c.choice: c for c in columns}.values(), key=lambda c: c.peak)
    if every[0].peak <= enough:
        return every[: 2 * _STARTS]
    crossed = [column_of(problem, m) for c in every[1:_STARTS] for m in mixtures(problem, every[0].choice, c.choice)]
    starts = sorted([*every, *crossed], key=lambda c: c.peak)[: 2 * _STARTS]
    if starts[0].peak <= enough:
        return starts
    linked, squeeze = links(problem), Aim(0.0, 1.0, 0.0)
    return [*starts, *(column_of(problem, descend(problem, linked, column.choice, squeeze)) for column in starts)]
