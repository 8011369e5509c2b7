"""Values that are read all over a problem whose exact tables are too large, against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Problem, objective
from autoshard.solvers import Clock, portfolio
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.elimination.dominance import finite
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.heuristics import brute_force
from autoshard.solvers.relax import hub_relaxation
from autoshard.solvers.relax.trws_layouts import Beliefs
from tests.random_problems import hub_problem, random_problem

SEEDS = st.integers(0, 10**9)
FIXTURE = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value with three readers is a hub; of each node few choices are looked at first."""
    monkeypatch.setattr(hub_relaxation, "_MANY", 2)
    monkeypatch.setattr(hub_relaxation, "_FEW", (2, 1))
    monkeypatch.setattr(hub_relaxation, "_NEAR", 0.0)


def every(problem: Problem) -> dict[tuple[int, ...], float]:
    choices = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    return {choice: objective(problem, choice) for choice in choices}


def optimum(problem: Problem) -> float:
    try:
        return brute_force.solve(problem).objective
    except InfeasibleError:
        return float("inf")


@given(SEEDS, st.booleans(), st.integers(0, 5))
@settings(max_examples=150)
def test_no_plan_with_a_choice_is_below_its_marginal(seed: int, hub: bool, rounds: int) -> None:
    problem = hub_problem(seed) if hub else random_problem(seed, most_nodes=5)
    beliefs = Beliefs(additive(problem))
    for _ in range(rounds):
        beliefs.round()
        beliefs.shift()
    plans = every(problem)
    for n, marginal in enumerate(beliefs.marginals()):
        for s, least in enumerate(marginal):
            true = min(seconds for choice, seconds in plans.items() if choice[n] == s)
            assert least <= true + 1e-9 * abs(least)


def test_marginals_of_a_chain_are_exact() -> None:
    problem = hub_problem(1, layers=1, forbid=0.0)
    plans = every(problem)
    for n, marginal in enumerate(Beliefs(additive(problem)).marginals()):
        true = [min(t for c, t in plans.items() if c[n] == s) for s in range(len(marginal))]
        assert marginal == pytest.approx(true, rel=1e-8)


@given(SEEDS)
@settings(max_examples=150, suppress_health_check=FIXTURE)
def test_a_problem_without_its_hubs_is_a_bound(narrow: None, seed: int) -> None:
    problem = hub_problem(seed)
    best = optimum(problem)
    if np.isfinite(best):
        cut = hub_relaxation.cut_off(problem, finite(problem))
        assert len(cut.values) == len(problem.values) - 1
        assert optimum(cut) <= best + 1e-9


@given(SEEDS, st.booleans(), st.sampled_from([1, 30, 10**6]))
@settings(max_examples=300, suppress_health_check=FIXTURE)
def test_bounds_and_plans_around_hubs_are_true(narrow: None, seed: int, hub: bool, budget: int) -> None:
    problem = hub_problem(seed) if hub else random_problem(seed, forbid=0.05)
    best = optimum(problem)
    found = None
    if np.isfinite(best):
        found = hub_relaxation.bounded(Incumbent(problem), budget, Clock())
    if found is not None:
        assert found.bound <= best + 1e-9 * abs(best)
        assert best <= objective(problem, found.choice) + 1e-9 * abs(best)


def test_most_hubs_are_closed(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tables that the whole problem does not fit into, but what is left of it does."""
    closed = []
    for seed in range(60):
        problem = hub_problem(seed, layers=6, forbid=0.0)
        best = optimum(problem)
        found = portfolio.solve(problem, budget_entries=40)
        assert found.lower_bound <= best + 1e-9 and best <= found.objective + 1e-9
        closed.append(found.objective <= best * (1 + 1e-9) and found.lower_bound >= 0.97 * best)
    assert np.mean(closed) > 0.8


def test_a_rough_plan_is_good_and_what_did_not_fit_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    whole = portfolio.minimum_within

    def counted(problem: Problem, *rest: object, **more: object) -> object:
        tried.append(portfolio.structure(problem))
        return whole(problem, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(portfolio, "minimum_within", counted)
    for seed in range(20):
        problem = hub_problem(seed, layers=5, forbid=0.0)
        costlier = replace(problem, values=tuple(replace(v, seconds=2.0 * v.seconds) for v in problem.values))
        best, unfit = portfolio.solve(costlier), set[int]()
        portfolio.solve(problem, budget_entries=2, unfit=unfit)
        tried.clear()
        rough = portfolio.solve(costlier, rough=True, unfit=unfit)
        assert portfolio.structure(problem) == portfolio.structure(costlier) and not (unfit and tried)
        assert best.objective * (1 - 1e-9) <= rough.objective <= 1.5 * best.objective + 1e-12
        assert rough.lower_bound <= best.objective * (1 + 1e-9)
        assert portfolio.solve(costlier, rough=True).objective == pytest.approx(best.objective)
