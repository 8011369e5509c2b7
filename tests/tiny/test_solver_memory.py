"""Memory limits: bounds are always valid, a plan that fits is found, and "infeasible" is proven or says it is not."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Node, Problem, Value, memory, objective
from autoshard.solvers import portfolio
from autoshard.solvers.common.clock import watched
from autoshard.solvers.common.local_search import (
    Aim,
    descend,
    footprints,
    line,
    links,
    mixtures,
    objectives,
    options,
)
from autoshard.solvers.common.result import peak
from autoshard.solvers.common.solver_options import Clock
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import minimise
from autoshard.solvers.heuristics import brute_force
from autoshard.solvers.relax import low_memory_plans, memory_columns
from autoshard.solvers.relax.low_memory_plans import LowMemoryPlans, minimum_memory_bound
from autoshard.solvers.relax.memory_columns import column_of, condensed
from autoshard.solvers.relax.restricted_master import mixture
from autoshard.units import format_bytes
from tests.looks import Looks
from tests.random_problems import hub_problem, limited, random_problem
from tests.slow import quick_at

SEEDS = st.integers(0, 10**9)


def every(problem: Problem) -> list[tuple[int, ...]]:
    choices = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    return [choice for choice in choices if math.isfinite(objective(problem, choice))]


@pytest.mark.slow
@given(SEEDS)
@settings(max_examples=150)
def test_the_bound_is_valid_and_the_plan_fits(seed: int) -> None:
    problem = limited(random_problem(seed), seed)
    try:
        solution = portfolio.solve(problem)
    except InfeasibleError as error:
        if error.proven:
            with pytest.raises(InfeasibleError):
                brute_force.solve(problem)
        return
    best = brute_force.solve(problem)
    assert solution.lower_bound <= best.objective + 1e-9
    assert best.objective <= solution.objective + 1e-9
    assert solution.objective == objective(problem, solution.choice)
    assert solution.peak_bytes == memory(problem, solution.choice).max() <= problem.capacity_bytes
    assert solution.choice == portfolio.solve(problem).choice


@pytest.mark.slow
def test_plans_that_fit_are_found_and_are_near_the_best() -> None:
    """Over a fixed set; the measured figures are 100 % found and 99 % best."""
    solved = exact = total = 0
    for seed in range(400):
        problem = limited(random_problem(seed), seed)
        try:
            best = brute_force.solve(problem).objective
        except InfeasibleError:
            continue
        total += 1
        try:
            reached = portfolio.solve(problem).objective
        except InfeasibleError:
            continue
        solved += 1
        exact += reached <= best + 1e-9
    assert total > 100
    assert solved >= 0.98 * total and exact >= 0.95 * total


@given(SEEDS)
@settings(max_examples=150)
def test_the_memory_bound_is_below_every_peak(seed: int) -> None:
    problem = random_problem(seed, most_nodes=5)
    choices = every(problem)
    if choices:
        assert minimum_memory_bound(problem) <= min(peak(problem, c) for c in choices) * (1 + 1e-9)


def test_the_memory_bound_is_often_tight() -> None:
    gaps = []
    for seed in range(100):
        problem = random_problem(seed, most_nodes=5, forbid=0.0)
        least = min(peak(problem, c) for c in every(problem))
        gaps.append(1 - minimum_memory_bound(problem) / least if least else 0.0)
    assert np.mean(gaps) < 0.05


@pytest.mark.slow
def test_a_plan_at_the_memory_bound_is_the_fastest_of_these() -> None:
    met = 0
    for seed in range(200):
        problem = random_problem(seed, most_nodes=5, forbid=0.0)
        lean = LowMemoryPlans(problem)
        bound, choice = lean.bound, lean.at_bound()
        if choice is None:
            continue
        met += 1
        leanest = [c for c in every(problem) if peak(problem, c) <= bound * (1 + 1e-9)]
        assert choice in leanest
        fastest = min(objective(problem, c) for c in leanest)
        assert objective(problem, choice) == pytest.approx(fastest, rel=1e-6, abs=1e-9)
    assert met > 50


def test_more_plans_meet_the_memory_bound_where_any_that_was_met_will_do() -> None:
    """Almost all of them are at it, the others the leanest met; and few are much slower than the fastest there."""
    exactly = roughly = near = 0
    for seed in range(200):
        problem = random_problem(seed, most_nodes=5, forbid=0.0)
        lean = LowMemoryPlans(problem)
        exactly += lean.at_bound() is not None
        choice = lean.at_bound(roughly=True)
        if choice is None:
            continue
        leanest = [c for c in every(problem) if peak(problem, c) <= lean.bound * (1 + 1e-9)]
        if choice not in leanest:
            assert min(column.peak for column in lean.columns) == peak(problem, choice) <= 1.2 * lean.bound
            continue
        roughly += 1
        near += objective(problem, choice) <= 1.1 * min(objective(problem, c) for c in leanest) + 1e-9
    assert roughly > 1.2 * exactly and roughly > 0.97 * 200 and near > 0.8 * roughly


def peaks_in_turn(count: int) -> Problem:
    """Operators alive one after the other, each of few bytes or many, for the same seconds; the last needs most."""
    sizes = [np.array([100.0, 10.0 + n]) for n in range(count)]
    nodes = tuple(Node(f"op{n}", np.zeros(2), size, (n, n + 1)) for n, size in enumerate(sizes))
    return Problem(nodes, (), horizon=count)


def test_times_that_need_as_much_are_not_priced_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lean = LowMemoryPlans(peaks_in_turn(12))
    assert lean.bound == pytest.approx(21.0, rel=1e-9) and len(lean.columns) <= 5
    monkeypatch.setattr(memory_columns, "CLOSE", 0.0)
    assert len(LowMemoryPlans(peaks_in_turn(12)).columns) > 10


def test_the_plan_to_start_from_is_the_least_of_what_costs_nothing() -> None:
    forbidding = 0
    for seed in range(60):
        problem = random_problem(seed, forbid=0.1 * (seed % 2))
        try:
            lean = LowMemoryPlans(problem)
        except InfeasibleError:
            continue
        least = minimise(lean.problem, Contents(lean.problem), scale=0.0)
        assert lean._start() == least.choice and math.isfinite(objective(problem, least.choice))
        forbidding += any(np.isinf(value.seconds).any() for value in problem.values)
    assert 5 < forbidding < 40


def test_plans_at_a_rate_are_the_least_at_its_prices() -> None:
    """Of seconds and priced bytes together, against every plan; and none has less of these bytes than the bound."""
    for seed in range(40):
        problem = random_problem(seed, most_nodes=5, forbid=0.0)
        lean = LowMemoryPlans(problem)
        lean.at_bound()
        for rate in (0.3, 3.0):
            choice = lean.at_rate(rate)
            if choice is None:
                assert not 0 < lean.seconds < math.inf
                continue
            columns = [column_of(lean.problem, plan) for plan in (choice, *every(problem))]
            priced = [float(lean.prices @ column.bytes) for column in columns]
            assert min(priced) >= lean.bound * (1 - 1e-9)
            per_byte = rate * lean.seconds / max(lean.bound, 1.0)
            cost, *others = (c.seconds + per_byte * price for c, price in zip(columns, priced, strict=True))
            assert cost == pytest.approx(min(others), rel=1e-9)


@pytest.mark.parametrize("entries", quick_at([20_000_000, 40], 0))
def test_lean_plans_around_what_is_read_all_over(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off, or with every value's readers apart where tables are small: plans are plans, and many meet the bound
    without exact tables of the whole."""
    monkeypatch.setattr(low_memory_plans, "SOON_ENTRIES", entries)
    monkeypatch.setattr(LowMemoryPlans, "_whole", lambda *_: None)
    met = 0
    for seed in range(30):
        problem = hub_problem(seed, layers=6, forbid=0.0)
        lean = LowMemoryPlans(problem)
        assert lean.shares.cut
        leanest, near = lean.at_bound(), lean.at_rate(1.0)
        assert near is None or math.isfinite(objective(problem, near))
        if leanest is not None:
            met += 1
            assert math.isfinite(objective(problem, leanest))
            assert peak(problem, leanest) == pytest.approx(lean.bound, rel=1e-6)
    assert met >= 10


@pytest.mark.parametrize("expired", [0, 1, 2, 3, 5, 8, 13, 21, 50, 100])
def test_least_memory_is_bounded_at_any_look_at_the_clock(expired: int) -> None:
    for seed in range(12):
        problem = random_problem(seed, most_nodes=5, forbid=0.0)
        with watched(Clock(expired, timer=Looks())):
            lean = LowMemoryPlans(problem)
            met, near = lean.at_bound(), lean.at_rate(1.0)
        peaks = [peak(problem, choice) for choice in every(problem)]
        assert lean.bound <= min(peaks) * (1 + 1e-9)
        assert met is None or peak(problem, met) <= lean.bound * (1 + 1e-6)
        assert near is None or near in every(problem)


def test_infeasible_is_proven_with_the_shortfall() -> None:
    problem = random_problem(3, forbid=0.0)
    least = min(peak(problem, c) for c in every(problem))
    assert least > 0
    bound = minimum_memory_bound(problem)
    capacity = 0.5 * bound
    with pytest.raises(
        InfeasibleError,
        match=f"at least {format_bytes(bound - capacity)} more than the capacity of {format_bytes(capacity)}",
    ):
        portfolio.solve(replace(problem, capacity_bytes=capacity))
    assert portfolio.solve(replace(problem, capacity_bytes=least)).peak_bytes == least


@given(SEEDS)
@settings(max_examples=150)
def test_condensed_times_keep_every_peak(seed: int) -> None:
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    small = condensed(problem)
    assert small.horizon <= problem.horizon
    for _ in range(5):
        choice = [int(rng.integers(len(node.seconds))) for node in problem.nodes]
        assert peak(small, choice) == peak(problem, choice)


@given(SEEDS)
@settings(max_examples=150)
def test_local_moves_are_priced_as_the_problem_says(seed: int) -> None:
    problem = random_problem(seed, forbid=0.0)
    rng = np.random.default_rng(seed)
    linked = links(problem)
    choice = [int(rng.integers(len(node.seconds))) for node in problem.nodes]
    n = int(rng.integers(len(choice)))
    moves = [[*choice[:n], s, *choice[n + 1 :]] for s in range(len(problem.nodes[n].seconds))]
    seconds, prints = options(problem, linked, choice, n), footprints(problem, linked, choice, n)
    for s, move in enumerate(moves):
        change = objective(problem, move) - objective(problem, moves[0])
        assert math.isclose(seconds[s] - seconds[0], change, abs_tol=1e-9)
        assert np.allclose(prints[s] - prints[0], memory(problem, move) - memory(problem, moves[0]))


@given(SEEDS, st.floats(0, 1))
@settings(max_examples=100)
def test_descent_never_makes_it_worse(seed: int, penalty: float) -> None:
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    start = tuple(int(rng.integers(len(node.seconds))) for node in problem.nodes)
    aim = Aim(1.0, penalty, 6.0)
    end = descend(problem, links(problem), start, aim)

    def score(choice: tuple[int, ...]) -> float:
        return objective(problem, choice) + penalty * max(0.0, peak(problem, choice) - aim.capacity)

    assert score(end) <= score(start) + 1e-9


@given(SEEDS, st.integers(1, 5), st.integers(1, 12))
@settings(max_examples=200)
def test_the_master_program_against_scipy(seed: int, rows: int, plans: int) -> None:
    rng = np.random.default_rng(seed)
    costs, usages = rng.random(plans), rng.integers(0, 5, (rows, plans)) / 4.0
    limits = rng.random(rows)
    penalty = float(rng.choice([0.5, 3.0, 1e4]))
    multipliers, weights, value = mixture(costs, usages, limits, penalty)
    expected = linprog(
        np.append(costs, penalty),
        A_ub=np.hstack([usages, -np.ones((rows, 1))]),
        b_ub=limits,
        A_eq=[[1.0] * plans + [0.0]],
        b_eq=[1.0],
    )
    assert math.isclose(value, expected.fun, rel_tol=1e-6, abs_tol=1e-6)
    assert math.isclose(weights.sum(), 1.0, abs_tol=1e-9) and (weights >= 0).all()
    assert (multipliers >= 0).all() and multipliers.sum() <= penalty * (1 + 1e-9)
    dual = (costs + multipliers @ usages).min() - multipliers @ limits
    assert math.isclose(dual, value, rel_tol=1e-6, abs_tol=1e-6)


@given(SEEDS)
@settings(max_examples=60)
def test_many_plans_are_priced_as_each(seed: int) -> None:
    problem, rng = random_problem(seed, forbid=0.1), np.random.default_rng(seed)
    some = np.array([[rng.integers(len(node.seconds)) for node in problem.nodes] for _ in range(20)])
    assert objectives(problem, some) == pytest.approx([objective(problem, choice) for choice in some.tolist()])


def test_a_stretch_has_the_weights_that_it_reads() -> None:
    """Stored tensors come first among the nodes; in the line each stands before the operator that reads it."""
    every, none = np.arange(2), ((0, 0),)
    nodes = tuple(Node(name, np.zeros(2), np.zeros(2), (0, 0)) for name in ("w0", "w1", "op0", "op1"))
    ends = ((0, 2), (1, 3), (2, 3))
    values = tuple(Value(f"v{a}", a, (b,), every, (every,), np.eye(2), np.zeros(2), none) for a, b in ends)
    problem = Problem(nodes, values, horizon=1)
    assert line(problem) == [0, 2, 1, 3]
    assert (0, 1, 0, 1) in [choice for _, choice in mixtures(problem, (0,) * 4, (1,) * 4, 32)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), hubs=st.booleans(), weight=st.sampled_from([1.0, 0.5]))
def test_descent_that_looks_at_moved_neighbours_alone_is_plain_descent(seed: int, hubs: bool, weight: float) -> None:
    problem = hub_problem(seed) if hubs else random_problem(seed, most_nodes=12, forbid=0.0)
    linked, rng = links(problem), np.random.default_rng(seed)
    start = [int(rng.integers(len(node.seconds))) for node in problem.nodes]
    plain = list(start)
    for _ in range(20):
        before = list(plain)
        for n in range(len(plain)):
            costs = options(problem, linked, plain, n)
            best = int(np.argmin(costs))
            here = costs[plain[n]]
            if costs[best] < here and (math.isinf(here) or here - costs[best] > 1e-12 * here):
                plain[n] = best
        if plain == before:
            break
    assert descend(problem, linked, start, Aim(weight, 0.0, math.inf)) == tuple(plain)
