"""Bounds by messages, plans over a few choices, and the clock that exact work looks at."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Node, Problem, Value, memory, objective
from autoshard.solvers import Clock, Options, portfolio, solve
from autoshard.solvers.common.clock import OutOfTime, Pace, attempt, check, watched
from autoshard.solvers.common.solver_options import Looks, PartialClock
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.heuristics import brute_force
from autoshard.solvers.relax import pruned_start
from autoshard.solvers.relax.trws_layouts import Beliefs
from tests.random_problems import limited, random_problem

SEEDS = st.integers(0, 10**9)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem counts as wide, and two choices as many."""
    monkeypatch.setattr(pruned_start, "_WIDE", 0)
    monkeypatch.setattr(pruned_start, "_FEW", 2)


def stopped() -> Clock:
    clock = Clock()
    clock.stop()
    return clock


def wide(count: int, choices: int, seed: int = 0) -> Problem:
    """A chain of equal nodes in which every value is read by the next two."""
    rng = np.random.default_rng(seed)
    own, table = rng.random(choices), rng.random((choices, choices))
    every = np.arange(choices)
    nodes = tuple(Node(f"n{n}", own, np.zeros(choices), (0, 0)) for n in range(count))
    values = tuple(
        Value(f"v{n}", n, (n + 1, n + 2), every, (every, every), table, np.zeros(choices), ((0, 0), (0, 0)))
        for n in range(count - 2)
    )
    return Problem(nodes, values, horizon=1)


@given(SEEDS, st.sampled_from([0.0, 0.3]), st.integers(1, 6))
@settings(max_examples=200)
def test_a_bound_by_messages_is_below_every_plan(seed: int, forbid: float, rounds: int) -> None:
    problem = random_problem(seed, most_nodes=5, forbid=forbid)
    multipliers = np.random.default_rng(seed).random(problem.horizon)
    every = list(itertools.product(*(range(len(node.seconds)) for node in problem.nodes)))
    for prices in (None, multipliers):
        beliefs = Beliefs(additive(problem, prices))
        for _ in range(rounds):
            bound = beliefs.round()
            beliefs.shift()
        paid = 0.0 if prices is None else np.array([float(prices @ memory(problem, choice)) for choice in every])
        least = (np.array([objective(problem, choice) for choice in every]) + paid).min()
        assert bound <= least + 1e-9 * abs(least)


def test_bounds_of_chains_are_exact_and_shifting_shares_raises_others() -> None:
    problem = wide(8, 5)
    chain = replace(
        problem,
        values=tuple(
            replace(v, consumers=v.consumers[:1], targets=v.targets[:1], intervals=v.intervals[:1])
            for v in problem.values
        ),
    )
    assert Beliefs(additive(chain)).round() == pytest.approx(portfolio.solve(chain).objective, rel=1e-8)
    beliefs, best = Beliefs(additive(problem)), portfolio.solve(problem).objective
    even = max(beliefs.round() for _ in range(10))
    for _ in range(30):
        beliefs.shift()
        beliefs.round()
    assert best - beliefs.bound < 0.5 * (best - even)


@given(SEEDS, st.booleans())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stopped_at_once_a_plan_is_valid_and_its_bound_true(narrow: None, seed: int, fits: bool) -> None:
    problem = random_problem(seed, forbid=0.1)
    problem = limited(problem, seed) if fits else problem
    try:
        best = brute_force.solve(problem)
    except InfeasibleError:
        best = None
    for options in (Options(clock=stopped()), Options(rough=True)):
        try:
            found = solve(problem, "dp", options)
        except InfeasibleError:
            assert best is None or fits
            continue
        assert best is not None
        assert found.objective == objective(problem, found.choice) and math.isfinite(found.objective)
        assert found.peak_bytes <= problem.capacity_bytes * (1 + 1e-9)
        assert found.lower_bound <= best.objective * (1 + 1e-9) + 1e-12


@given(SEEDS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_with_time_enough_it_is_the_optimum(narrow: None, seed: int) -> None:
    problem = random_problem(seed, forbid=0.0)
    clock = Clock(1e6)
    found = solve(problem, "dp", Options(clock=clock))
    assert found.status == "optimal" and not clock.cut
    assert found.objective == pytest.approx(brute_force.solve(problem).objective)


def test_the_clock_is_kept_where_exact_elimination_takes_long() -> None:
    problem = wide(30, 160)
    clock = Clock(400.0, timer=Looks())  # a second of work, on any machine the same
    found = solve(problem, "dp", Options(clock=clock))
    assert clock.seconds < 450.0
    assert clock.cut and found.status == "cut short"
    assert 0.0 < found.lower_bound < found.objective < objective(problem, [0] * 30)


def test_exact_work_stops_when_the_clock_does() -> None:
    check(1e30)  # nothing is watched
    with watched(Clock(60.0)):
        check(1e6)
        with pytest.raises(OutOfTime):
            check(1e30)
        with watched(stopped()), pytest.raises(OutOfTime):
            check()
        check()


def test_a_part_of_a_clock_is_over_with_the_whole() -> None:
    whole = Clock(60.0)
    part = PartialClock(1e6, whole=whole)
    assert 0 < part.left <= 60.0 and PartialClock(0.0, whole=whole).over
    whole.stop()
    assert part.over


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_clock_of_looks_is_over_after_as_many(limit: int) -> None:
    clock = Clock(limit, timer=Looks())
    assert [clock.over for _ in range(limit + 1)] == [False] * max(0, limit - 1) + [True] * (2 if limit else 1)
    part = PartialClock(3, whole=Clock(1e6, timer=Looks()))
    assert [part.over for _ in range(4)].count(False) == 1  # a part looks at its own clock and at the whole one's


def test_a_loop_that_will_not_end_in_time_leaves_off_early() -> None:
    def steps(total: int, limit: float) -> int:
        clock = Clock(limit, timer=Looks())
        with watched(clock):
            pace = Pace(total)
            for done in range(total):
                if attempt(pace.step, done) is None and clock.cut:
                    return done
        return total

    assert steps(100, 1e6) == 100
    assert 1 <= steps(10_000, 1000.0) < 100  # two looks a step: a tenth of the time, not all of it
    assert steps(100, 150.0) < 100


def test_what_repeats_goes_on_sharing_its_arrays() -> None:
    problem = wide(6, 8)
    keep = [np.array([1, 3])] * 5 + [np.array([2])]
    small = pruned_start.narrowed(problem, keep)
    assert len({id(node.seconds) for node in small.nodes}) == 2
    assert len({id(value.source) for value in small.values}) == 1
    assert objective(small, (0, 1, 0, 1, 0, 0)) == objective(problem, (1, 3, 1, 3, 1, 2))
