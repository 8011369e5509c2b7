"""The small linear program that sets the multipliers: the best mixture of the plans seen so far.

minimise   costs . weights + penalty x excess
subject to weights sum to 1 (all >= 0), usages @ weights - excess <= limits, excess >= 0

Its dual prices of the limits are the multipliers; they add up to at most `penalty`. Dense primal simplex: a few rows.
"""

from __future__ import annotations

import numpy as np

from autoshard.ir.problem import Floats
from autoshard.units import ROUNDING

_MOST_PIVOTS = 2000


def mixture(costs: Floats, usages: Floats, limits: Floats, penalty: float) -> tuple[Floats, Floats, float]:
    """(multipliers (rows,), weights (plans,), value). `costs` (plans,), `usages` (rows, plans), `limits` (rows,).

    Costs and usages should be near 1.
    """
    rows, plans = usages.shape
    matrix = np.zeros((rows + 1, plans + 1 + rows))  # columns: a weight per plan, the excess, a slack per row
    matrix[0, :plans] = 1.0
    matrix[1:, :plans] = usages
    matrix[1:, plans] = -1.0
    matrix[1:, plans + 1 :] = np.eye(rows)
    right = np.concatenate([[1.0], limits])
    prices = np.concatenate([costs, [penalty], np.zeros(rows)])
    basis = _start(usages[:, 0] - limits, plans)
    for pivot in range(_MOST_PIVOTS):
        inverse = np.linalg.inv(matrix[:, basis])
        level = inverse @ right
        dual = prices[basis] @ inverse
        entering = _entering(prices - dual @ matrix, first=pivot > _MOST_PIVOTS // 4)
        if entering < 0:
            break
        leaving = _leaving(inverse @ matrix[:, entering], level, basis)
        if leaving < 0:
            break
        basis[leaving] = entering
    weights = np.zeros(matrix.shape[1])
    weights[basis] = np.maximum(level, 0.0)
    return np.maximum(-dual[1:], 0.0), weights[:plans], float(prices[basis] @ level)


def _start(over: Floats, plans: int) -> list[int]:
    """Plan 0 alone; the excess covers the worst row where that is above its limit."""
    basis = [0, *range(plans + 1, plans + 1 + len(over))]
    if len(over) and over.max() > 0:
        basis[1 + int(np.argmax(over))] = plans
    return basis


def _entering(reduced: Floats, first: bool) -> int:
    """The most negative reduced cost, or (`first`, against cycling) the first negative; -1 at the optimum."""
    negative = np.flatnonzero(reduced < -ROUNDING)
    if not len(negative):
        return -1
    return int(negative[0] if first else np.argmin(reduced))


def _leaving(direction: Floats, level: Floats, basis: list[int]) -> int:
    """The row that reaches zero first, ties by the lowest column; -1 where none does."""
    ratios = [(max(level[i], 0.0) / d, basis[i], i) for i, d in enumerate(direction) if d > ROUNDING]
    return min(ratios)[2] if ratios else -1
