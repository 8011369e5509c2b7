"""Bounds by messages are bounds whatever the magnitudes beside them, and near the optimum where these are ordinary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autoshard.ir.problem import Floats, Problem, objective
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax.trws_layouts import Beliefs
from tests.random_problems import random_problem

WERE_WRONG = (41, 104, 372)  # with 1e9 or 1e15


def dear(problem: Problem, seed: int, factor: float) -> Problem:
    """Four of ten costs are about `factor` times as large."""
    rng = np.random.default_rng(seed)

    def more(costs: Floats) -> Floats:
        some = rng.random(costs.shape) < 0.4
        return np.where(some & np.isfinite(costs), factor * (costs + rng.random()), costs)

    nodes = tuple(replace(node, seconds=more(node.seconds)) for node in problem.nodes)
    return replace(problem, nodes=nodes, values=tuple(replace(v, seconds=more(v.seconds)) for v in problem.values))


def small(factor: float) -> Iterator[tuple[Problem, dict[tuple[int, ...], float]]]:
    """Problems with the objective of every choice that is allowed, where there is one."""
    for seed in (*range(30), *WERE_WRONG):
        problem = dear(random_problem(seed, most_nodes=5), seed, factor)
        if math.prod(len(node.seconds) for node in problem.nodes) <= 300:
            every = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
            known = {choice: value for choice in every if math.isfinite(value := objective(problem, choice))}
            if known:
                yield problem, known


@pytest.mark.parametrize("factor", [1.0, 1e9, 1e15])
def test_no_bound_is_above_a_plan_whatever_the_magnitudes(factor: float) -> None:
    met = 0
    for problem, known in small(factor):
        beliefs, best = Beliefs(additive(problem)), min(known.values())
        for _ in range(8):
            beliefs.round()
            beliefs.shift()
        assert beliefs.bound <= best * (1 + 1e-12)
        met += beliefs.bound >= best * (1 - 1e-9) - 1e-12
    assert met > 10 or factor > 1.0
