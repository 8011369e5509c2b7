"""What a choice costs beyond the bound: never more than the truth, and more than its own reduced cost says."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import objective
from autoshard.solvers import Clock, portfolio
from autoshard.solvers.elimination.dominance import finite
from autoshard.solvers.linear_program.highs_engine import Highs
from autoshard.solvers.linear_program.reduced_costs import excess
from autoshard.solvers.linear_program.rows import linear
from tests.random_problems import random_problem
from tests.tiny.test_solver_dp import blocks


@given(st.integers(0, 10**9))
@settings(max_examples=150)
def test_excess_is_below_every_plan_with_the_choice(seed: int) -> None:
    problem = random_problem(seed, most_nodes=5)
    try:
        kept = finite(problem)
    except InfeasibleError:
        return
    model = linear(problem, kept)
    relaxed = Highs(model, Clock(), 1.0).relax()
    if relaxed is None:
        return
    more = excess(model, relaxed.reduced)
    assert (more >= np.maximum(relaxed.reduced[: model.choices], 0.0)).all()
    for choice in itertools.product(*kept):
        value = objective(problem, choice)
        if math.isfinite(value):
            assert relaxed.bound + more[model.columns_of(choice)].max() <= value * (1 + 1e-9) + 1e-9


def test_trees_say_more_than_reduced_costs() -> None:
    problem = blocks(8)
    model = linear(problem, finite(problem))
    best = portfolio.solve(problem).objective
    relaxed = Highs(model, Clock(), best).relax()
    assert relaxed is not None
    gap = 1.005 * best - relaxed.bound
    by_trees = (excess(model, relaxed.reduced) <= gap).sum()
    assert by_trees < (relaxed.reduced[: model.choices] <= gap).sum()
