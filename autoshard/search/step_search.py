"""Level 2: plans by what a step takes, and a bound below the simulated step of every plan.

The bound is the largest, over weights of the resources of a step, of the least that a plan occupies in the weighted mean
(`formulation/step_resources`). The plans are the least ones of a few means of what a step takes roughly. Between weights
only prices change; shares of readers and plans are kept (`solvers/relax/reader_shares`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.formulation.step_resources import StepResources
from autoshard.ir.problem import Floats
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import minimum_within
from autoshard.solvers.relax.reader_shares import ReaderShares
from autoshard.solvers.relax.restricted_master import mixture

_WEIGHTS = 6  # of resources, tried for the bound
_ROUNDS = (5, 2, 2)  # of shares, for each mean that is tried for plans
_CLOSE = 5e-3  # relative: between the bound and what more weights can give
_SAME = 0.02  # weights that differ by less give the same plan
_ENTRIES = 20_000_000


@dataclass(frozen=True, eq=False)
class StepBound:
    """No plan's step is below `seconds`, as the mean by `weights` of what each resource is occupied shows. `tried`: all
    weights, each with its least choice."""

    seconds: float
    weights: Floats
    tried: tuple[tuple[Floats, Choice], ...]


def step_bound(resources: StepResources, known: Sequence[Choice]) -> StepBound:
    """The bound, from the weights for which the plans `known` occupy most. 0 seconds where tables are too large, or time
    is over, before one is proved."""
    contents = Contents(resources.problem)
    used = [resources.least_used(choice) for choice in known]
    weights = kept = heaviest(used)[0]
    best = 0.0
    tried: list[tuple[Floats, Choice]] = []
    for _ in range(_WEIGHTS):
        problem = resources.bounding(weights)
        contents.also(problem)
        found = attempt(minimum_within, problem, contents, budget_entries=_ENTRIES)
        if found is None:
            break
        tried.append((weights, found.choice))
        bound = found.bound + float(weights @ resources.constants)
        if bound > best:
            best, kept = bound, weights
        used.append(resources.least_used(found.choice))
        far, most = heaviest(used)
        if most <= best * (1 + _CLOSE):
            break
        weights = (kept + far) / 2  # half of the way: the plans known so far say little far from their weights
    return StepBound(best, kept, tuple(tried))


def heaviest(used: Sequence[Floats]) -> tuple[Floats, float]:
    """The weights, 1 together in each phase, for which the least mean of these plans is largest, and that mean.

    `used`: of each plan the seconds of the resources of the forward, then those of the backward.
    """
    table = np.array(used)
    count = table.shape[1] // 2
    forward, backward = table[:, :count], table[:, count:]
    sums = (forward[:, :, None] + backward[:, None, :]).reshape(len(used), -1).T  # (a resource of each phase, plans)
    scale = float(sums.max()) or 1.0
    prices, _, value = mixture(np.zeros(len(used)), sums / scale, np.zeros(len(sums)), 1.0)
    total = float(prices.sum())
    pairs = (prices / total if total > 0 else np.full(len(sums), 1 / len(sums))).reshape(count, count)
    return np.concatenate([pairs.sum(axis=1), pairs.sum(axis=0)]), value * scale


def rough_seconds(used: Floats) -> float:
    """What a step takes that occupies its resources so: the largest of each phase."""
    count = len(used) // 2
    return float(used[:count].max() + used[count:].max())


def likely_plans(resources: StepResources, shares: ReaderShares) -> Iterator[Choice]:
    """Plans that are least in means of what is roughly used: everything in a row first, then what those found so far
    occupy most; what overflows is left out. Raises InfeasibleError where choices exclude each other."""
    names = resources.names
    weights = np.tile(np.array([name == "in a row" for name in names], float), 2)
    used: list[Floats] = []
    for rounds in _ROUNDS:
        state = Incumbent(resources.likely(weights))
        if not shares.search(state, rounds) or state.choice is None:
            return
        used.append(resources.roughly_used(state.choice))
        yield state.choice
        new = (weights + heaviest(used)[0]) / 2
        if np.abs(new - weights).max() < _SAME:
            return
        weights = new
