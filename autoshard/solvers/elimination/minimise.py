"""The minimum of an additive problem: reduce, encode, order, eliminate; or a lower bound of it within a budget.

    minimise over x:  sum_n a_n(x_n) + sum_v sum_{t in T_v(x)} b_v(s_v(x), t)

with n the nodes, x_n a strategy, v the values, s_v the layout that the producer leaves, T_v the set of layouts that the
consumers need; a and b are scale x seconds + sum_time multiplier x bytes (`weighted_sum.additive`).

- Strategies that no minimum needs go: x_n without a finite partner; x_n where another y_n is never more expensive,
  a_n(x_n) - a_n(y_n) + sum_v min over the other ends of (b_v with x_n - b_v with y_n) >= 0. Implemented in
  `dominance.reduce`.
- The sum over sets T_v becomes terms f over few variables each. Implemented in `factor_encoding.encode`.
- An order of the variables; its work is sum_u prod of the domains of u and its neighbours, known before anything is
  computed. Implemented in `elimination_order.plan`.
- Of a variable u with the terms F(u) and neighbours y: g(y) = min_{x_u} sum_{f in F(u)} f(x_u, y). Implemented in
  `min_plus.min_plus`; the constants that are left add up to the minimum, implemented in `min_plus.run`.
- In reverse order x_u = argmin sum_{f in F(u)} f(x_u, y). Implemented in `min_plus.backtrack`.
- Where no order fits the budget: mini-buckets, g(y) >= sum over parts P of F(u) of min_{x_u} sum_{f in P} f(x_u, y), a
  lower bound. Implemented in `factor_graph.TermGraph.buckets`.
- Of k equal blocks in a row: M_{2i}(x, z) = min_y M_i(x, y) + M_i(y, z). Implemented in `block_doubling.solve_folded`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem
from autoshard.solvers.common.effort import BUDGET_ENTRIES
from autoshard.solvers.elimination import min_plus
from autoshard.solvers.elimination.block_doubling import foreseen, solve_folded
from autoshard.solvers.elimination.compress_blocks import shortened
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.dominance import reduce
from autoshard.solvers.elimination.encoding_choice import best, bounding
from autoshard.solvers.elimination.subproblem import around
from autoshard.solvers.elimination.weighted_sum import Additive, additive


@dataclass(frozen=True, eq=False)
class Minimum:
    """`bound` <= the minimum of an additive problem; `choice` attains it where `exact`."""

    bound: float
    choice: tuple[int, ...]
    exact: bool


def minimise(
    problem: Problem,
    contents: Contents,
    *,
    multipliers: Floats | None = None,
    scale: float = 1.0,
    allowed: Sequence[Integers] | None = None,
    budget_entries: int = BUDGET_ENTRIES,
) -> Minimum:
    """Minimises scale x seconds + sum over t of multipliers[t] x memory(t), without a limit on memory.

    `allowed`: the strategies of each node that may be used. `contents` is made of `problem`.
    Raises InfeasibleError where no allowed combination exists.
    """
    minimum = minimum_within(
        problem,
        contents,
        multipliers=multipliers,
        scale=scale,
        allowed=allowed,
        budget_entries=budget_entries,
        coarse=True,
    )
    assert minimum is not None
    return minimum


def minimum_within(
    problem: Problem,
    contents: Contents,
    *,
    multipliers: Floats | None = None,
    scale: float = 1.0,
    allowed: Sequence[Integers] | None = None,
    budget_entries: int = BUDGET_ENTRIES,
    coarse: bool = False,
) -> Minimum | None:
    """The same; but unless `coarse`, None where the tables of no order fit the budget."""
    sum_ = additive(problem, multipliers, scale)
    if allowed is None:
        folded = solve_folded(sum_, contents, budget_entries)
        if folded is not None:
            return Minimum(folded.value, folded.choice, True)
    few = around(sum_, allowed) if allowed is not None else None
    if few is None or allowed is None:
        return _minimum(sum_, contents, allowed, budget_entries, coarse)
    there = Additive(few.part, scale, sum_.cumulative)
    minimum = _minimum(there, contents, few.allowed, budget_entries, coarse)
    if minimum is None:
        return None
    return Minimum(minimum.bound + few.cost, few.whole(minimum.choice, allowed), minimum.exact)


def out_of_reach(problem: Problem, contents: Contents, budget_entries: int) -> bool:
    """True if the tables of what repeats are above the budget before any strategy is left out: a quick check."""
    sum_ = additive(problem)
    short = shortened(sum_, contents)
    return short is not None and not foreseen(sum_, short, contents, budget_entries)


def _minimum(
    sum_: Additive, contents: Contents, allowed: Sequence[Integers] | None, budget_entries: int, coarse: bool
) -> Minimum | None:
    choices = reduce(sum_, contents, allowed)
    chosen = best(sum_, choices, contents, budget_entries)
    if chosen is None and not coarse:
        return None
    store, encoded, plan = chosen or bounding(sum_, choices, contents, budget_entries)
    bound = min_plus.run(store, plan)
    if math.isinf(bound):
        raise InfeasibleError("every combination of strategies is forbidden: no strategies of all nodes go together")
    picked = min_plus.backtrack(store, plan)
    choice = tuple(int(some[s]) for some, s in zip(choices, picked, strict=False))
    return Minimum(bound, choice, plan.exact and not encoded.relaxed)
