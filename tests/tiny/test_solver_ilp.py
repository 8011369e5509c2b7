"""The ilp solver and its engines against brute force and dp; what they say when they are stopped."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import InfeasibleError, UsageError
from autoshard.ir.problem import Problem, memory, objective
from autoshard.solvers import Clock, Options, portfolio, solve
from autoshard.solvers.common.pareto_choices import undominated
from autoshard.solvers.common.result import Solution
from autoshard.solvers.common.star_bound import star_bound
from autoshard.solvers.elimination.dominance import finite
from autoshard.solvers.heuristics import brute_force
from autoshard.solvers.ilp import branch_and_bound, pulp_engine
from autoshard.solvers.linear_program.highs_engine import Highs
from autoshard.solvers.linear_program.memory_constraints import MemoryRows, expected
from autoshard.solvers.linear_program.rows import linear, pairs
from tests.random_problems import limited, random_problem
from tests.tiny.test_solver_dp import blocks, chain, close

SEEDS = st.integers(0, 10**9)


def attempt(problem: Problem, options: Options | None = None, start: bool = True) -> Solution | None:
    try:
        return branch_and_bound.solve(problem, options or Options(), start=start)
    except InfeasibleError as error:
        assert error.proven
        return None


def best(problem: Problem) -> Solution | None:
    try:
        return brute_force.solve(problem)
    except InfeasibleError:
        return None


def check(problem: Problem, found: Solution | None) -> None:
    expected_ = best(problem)
    assert (found is None) == (expected_ is None)
    if found is not None and expected_ is not None:
        assert found.status == "optimal"
        assert close(found.objective, expected_.objective)
        assert found.objective == objective(problem, found.choice) == found.lower_bound
        assert found.peak_bytes == memory(problem, found.choice).max(initial=0.0) <= problem.capacity_bytes


@given(SEEDS, st.sampled_from([0.0, 0.1, 0.4]), st.booleans(), st.booleans())
@settings(max_examples=400)
def test_ilp_is_optimal(seed: int, forbid: float, start: bool, limit: bool) -> None:
    problem = random_problem(seed, forbid=forbid)
    problem = limited(problem, seed) if limit else problem
    check(problem, attempt(problem, start=start))


@pytest.mark.parametrize("engine", ["pulp:CBC", "pulp:HiGHS", "pulp"])
def test_pulp_solves_the_same_problem(engine: str) -> None:
    for seed in range(12):
        problem = limited(random_problem(seed, forbid=0.05), seed) if seed % 3 else random_problem(seed)
        check(problem, attempt(problem, Options(engine=engine)))


@pytest.mark.parametrize("seed", range(30))
def test_choices_of_far_more_bytes_than_fit(seed: int) -> None:
    """HiGHS takes no rows of such numbers, and without a row a plan that overflows would stand."""
    rng, problem = np.random.default_rng(seed), random_problem(seed)
    nodes = tuple(replace(n, bytes=n.bytes * rng.choice([1.0, 1e17], len(n.bytes))) for n in problem.nodes)
    problem = replace(problem, nodes=nodes, capacity_bytes=float(rng.integers(0, 20)))
    check(problem, attempt(problem, start=False))


def test_equal_blocks() -> None:
    problem = blocks(12)
    expected_ = portfolio.solve(problem)
    assert close(solve(problem, "ilp").objective, expected_.objective)
    assert pairs(problem) == 12 * 4 * 8 * 8
    assert close(branch_and_bound.solve(problem, Options(), start=False).lower_bound, expected_.objective)


@given(SEEDS)
@settings(max_examples=200)
def test_the_relaxation_is_a_bound_and_every_plan_a_point_of_it(seed: int) -> None:
    """The columns that belong to a plan cost its objective; its expected bytes are its memory."""
    problem = limited(random_problem(seed), seed)
    try:
        kept = undominated(problem, finite(problem))
    except InfeasibleError:
        return
    plan = best(replace(problem, capacity_bytes=math.inf))
    if plan is None:
        return
    model = linear(problem, kept)
    highs = Highs(model, Clock(), plan.objective)
    relaxed = highs.relax()
    assert relaxed is not None
    assert relaxed.bound <= plan.objective * (1 + 1e-9) + 1e-9
    rng = np.random.default_rng(seed)
    choice = tuple(int(rng.choice(some)) for some in kept)
    columns = model.columns_of(choice)
    fixed = linear(problem, [np.array([s]) for s in choice])
    x = np.zeros(model.choices)
    x[columns] = 1.0
    assert model.picked(x) == choice
    if math.isfinite(objective(problem, choice)):
        one = Highs(fixed, Clock(), 1.0).relax()
        assert one is not None and close(one.bound, objective(problem, choice))
    alive = expected(problem, model, x)
    assert (alive <= memory(problem, choice) + 1e-9).all()


@given(SEEDS)
@settings(max_examples=200)
def test_a_memory_row_says_what_is_alive(seed: int) -> None:
    """With a row for every time, a fixed choice is feasible exactly where it fits."""
    problem = random_problem(seed, forbid=0.0)
    rng = np.random.default_rng(seed)
    choice = [int(rng.integers(len(node.seconds))) for node in problem.nodes]
    alive = memory(problem, choice).max()
    for capacity, fits in ((alive, True), (alive - 0.5, False)):
        if capacity <= 0:
            continue
        limit = replace(problem, capacity_bytes=float(capacity))
        model = linear(limit, [np.array([s]) for s in choice])
        highs = Highs(model, Clock(), 1.0)
        highs.add(MemoryRows(limit, model, len(model.cost)).rows(range(limit.horizon)))
        assert (highs.relax() is not None) == fits


@given(SEEDS)
@settings(max_examples=200)
def test_thin_choices_hold_an_optimum(seed: int) -> None:
    problem = limited(random_problem(seed, forbid=0.0), seed)
    found = best(problem)
    if found is None:
        return
    allowed = undominated(problem, finite(problem))
    forbidden = [np.isin(np.arange(len(n.seconds)), some) for n, some in zip(problem.nodes, allowed, strict=True)]
    nodes = tuple(
        replace(node, seconds=np.where(ok, node.seconds, np.inf))
        for node, ok in zip(problem.nodes, forbidden, strict=True)
    )
    assert close(brute_force.solve(replace(problem, nodes=nodes)).objective, found.objective)


@given(SEEDS)
@settings(max_examples=200)
def test_the_star_bound_is_below_every_plan(seed: int) -> None:
    problem = random_problem(seed)
    found = best(problem)
    if found is not None:
        assert star_bound(problem) <= found.objective * (1 + 1e-12) + 1e-12


def test_the_star_bound_is_exact_for_one_star() -> None:
    problem = chain(2, [3.0, 1.0], np.array([[0.0, 5.0], [5.0, 1.0]]))
    assert close(star_bound(problem), solve(problem, "exhaustive").objective)


@pytest.mark.parametrize("engine", ["magic", "pulp:MAGIC", "pulp:GUROBI", "pulp:CPLEX"])
def test_engines_that_are_not_there(engine: str) -> None:
    if engine.partition(":")[2] in pulp_engine.available():
        pytest.skip("it is there")
    with pytest.raises(UsageError, match="available here are highs, pulp:CBC"):
        solve(chain(2, [1.0, 2.0]), "ilp", Options(engine=engine))


def stopped() -> Clock:
    clock = Clock()
    clock.stop()
    return clock


@pytest.mark.parametrize("engine", ["highs", "pulp:CBC"])
def test_a_stopped_clock_still_gives_an_honest_answer(engine: str) -> None:
    problem = blocks(6)
    expected_ = portfolio.solve(problem).objective
    found = solve(problem, "ilp", Options(clock=stopped(), engine=engine))
    assert found.lower_bound <= expected_ * (1 + 1e-9) <= found.objective * (1 + 2e-9)
    assert found.status == "cut short" or close(found.lower_bound, found.objective)


def test_without_a_plan_a_stopped_clock_proves_nothing() -> None:
    with pytest.raises(InfeasibleError, match="not proven"):
        branch_and_bound.solve(blocks(6), Options(clock=stopped()), start=False)


def test_the_clock_stops_highs_inside() -> None:
    """A clock that is over after the first look: HiGHS asks it again while it works."""

    class Late(Clock):
        looks = 0

        @property
        def over(self) -> bool:
            self.looks += 1
            return self.looks > 3

    model = linear(blocks(40), finite(blocks(40)))
    highs = Highs(model, Late(), 1.0)
    relaxed = highs.relax()
    assert highs.solver.getInfo().simplex_iteration_count < 100
    assert relaxed is None or relaxed.bound <= portfolio.solve(blocks(40)).objective
