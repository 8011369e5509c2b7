"""Limits of memory and of time: bounds and plans stand around the optimum, whenever it is stopped."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard import solvers
from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Node, Problem, Value, memory, objective
from autoshard.solvers import portfolio, solve
from autoshard.solvers.common.clock import OutOfTime, Pace, attempt, check, watched
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.solver_options import Clock, Options, PartialClock
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import minimum_within
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.heuristics import brute_force
from autoshard.solvers.linear_program.highs_engine import Highs
from autoshard.solvers.linear_program.rows import linear
from autoshard.solvers.relax import reader_terms, restricted_start, wide_choices
from autoshard.solvers.relax.limited_search import LimitedSearch
from autoshard.solvers.relax.memory_presolve import starting_plan
from autoshard.solvers.relax.reader_shares import ReaderShares
from autoshard.solvers.relax.trws_layouts import Beliefs
from tests.looks import Looks
from tests.random_problems import hub_problem, limited, random_problem
from tests.slow import quick_at
from tests.tiny.test_solver_fold import repeated

# --- memory limits on large problems: bounds under prices of bytes, plans between two, least memory first ---


def priced(problem: Problem, choice: tuple[int, ...], multipliers: np.ndarray, scale: float) -> float:
    return scale * objective(problem, choice) + float(multipliers @ memory(problem, choice))


@pytest.mark.parametrize("seed", range(60))
def test_what_is_taken_apart_is_below_every_plan_at_its_prices(seed: int) -> None:
    problem = hub_problem(seed) if seed % 2 else random_problem(seed, most_nodes=5)
    rng = np.random.default_rng(seed)
    multipliers = np.where(rng.random(problem.horizon) < 0.4, rng.random(problem.horizon), 0.0)
    scale = float(rng.choice([0.0, 1.0, 2.0]))
    choices = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    plans = [choice for choice in choices if np.isfinite(objective(problem, choice))]
    if not plans:
        return
    least = min(priced(problem, choice, multipliers, scale) for choice in plans)
    shares = ReaderShares(problem)
    for part, prices, own_scale in (
        (shares.apart(problem, multipliers, scale), None, 1.0),
        (reader_terms.without_hubs(additive(problem, multipliers, scale), shares.cut), multipliers, scale),
    ):
        minimum = minimum_within(part, Contents(part), multipliers=prices, scale=own_scale)
        assert minimum is not None
        assert minimum.bound <= least * (1 + 1e-9) + 1e-12


def layers(count: int) -> Problem:
    """In each layer the fast way keeps 4 bytes until the end of the step, the slow one 1; a change of way costs."""
    change = np.array([[0.0, 0.1], [0.1, 0.0]])
    ways, sizes = np.array([0, 1]), np.array([4.0, 1.0])
    nodes = tuple(Node(f"layer{i}", np.array([1.0, 1.5]), sizes, (i, count + 1)) for i in range(count))
    values = tuple(Value(f"v{i}", i, (i + 1,), ways, (ways,), change, np.zeros(2), ((0, 0),)) for i in range(count - 1))
    hub = Value("hub", 0, tuple(range(1, count)), ways, (ways,) * (count - 1), 0.01 * change, np.zeros(2),
                ((0, 0),) * (count - 1))  # fmt: skip
    return Problem(nodes, (*values, hub), horizon=count + 1)


@pytest.mark.parametrize("share", quick_at([0.95, 0.8, 0.6], 0))
def test_layers_are_as_fast_as_the_limit_allows(share: float) -> None:
    count = 60
    problem = replace(layers(count), capacity_bytes=share * 4.0 * count)
    solution = solvers.solve(problem, "auto")
    slow = int(np.ceil((4.0 * count - problem.capacity_bytes) / 3.0))  # layers that have to save 3 bytes
    best = count + 0.5 * slow + 0.1 + 0.01
    assert solution.peak_bytes <= problem.capacity_bytes
    assert solution.lower_bound <= best * (1 + 1e-9) and solution.objective <= best * 1.005
    assert 1 - solution.lower_bound / solution.objective <= 0.01


def test_what_can_not_fit_is_proven_from_the_least_memory() -> None:
    problem = replace(layers(60), capacity_bytes=59.0)
    with pytest.raises(InfeasibleError) as error:
        solvers.solve(problem, "auto")
    assert error.value.proven


@pytest.mark.parametrize("solver", ["auto", "dp", "ilp"])
def test_that_the_smallest_sizes_overflow_is_proven_without_any_time(solver: str) -> None:
    with pytest.raises(InfeasibleError, match="every plan needs at least 1 B more") as error:
        solvers.solve(replace(layers(60), capacity_bytes=59.0), solver, Options(clock=Clock(0.0)))
    assert error.value.proven


def test_integer_programs_begin_with_what_was_found_before_the_clock_ended() -> None:
    problem, clock = replace(layers(60), capacity_bytes=0.6 * 240.0), Clock(1500.0, timer=Looks())
    with watched(clock):
        begun = starting_plan(problem, Options(clock=clock))
    assert clock.cut and begun.bound >= 60.0, "as without the limit, where each takes its fast way"


def test_no_program_is_taken_in_that_took_longer_to_write_than_is_left() -> None:
    problem = layers(4)
    model = linear(problem, [np.arange(2)] * 4)
    for left, in_time in ((30.0, True), (5.0, False)):
        clock = Clock(20.0 + left, timer=Looks())
        with watched(clock):
            pace = Pace(2)
            while clock.seconds < 20.0:
                pass
            engine = attempt(Highs, model, clock, 1.0, pace)
        assert (engine is not None) == in_time == (not clock.cut)


@pytest.mark.parametrize("seed", range(60))
def test_bound_and_plan_stand_around_the_optimum_whenever_it_is_stopped(seed: int) -> None:
    problem = limited(hub_problem(seed) if seed % 2 else random_problem(seed), seed)
    try:
        best = solvers.solve(problem, "exhaustive")
    except InfeasibleError:
        return
    for looks in (3, 10, 30, 100, 1000):
        try:
            solution = solvers.solve(problem, "auto", Options(clock=Clock(looks, timer=Looks())))
        except InfeasibleError as error:
            assert not error.proven
            continue
        assert solution.lower_bound <= best.objective * (1 + 1e-9) <= solution.objective * (1 + 2e-9)


def test_plans_of_one_limit_begin_the_next() -> None:
    problem = layers(40)
    shares, free = ReaderShares(problem), Incumbent(problem)
    shares.search(free)
    assert free.choice is not None
    rounds = []
    for share in (0.9, 0.88):
        state = Incumbent(replace(problem, capacity_bytes=share * 160.0))
        state.offer(free.choice)
        state.raise_bound(free.bound)
        search = LimitedSearch(state, shares, 10**7)
        before = len(search.columns)
        search.run()
        rounds.append(len(search.columns) - before)
    assert rounds[1] < rounds[0]


@pytest.mark.parametrize("seed", range(120))
def test_few_choices_and_messages_stand_around_the_optimum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_choices, "SOME", 1 + seed % 3)
    problem = limited(hub_problem(seed) if seed % 2 else random_problem(seed), seed)
    try:
        best = solvers.solve(problem, "exhaustive").objective
    except InfeasibleError:
        best = np.inf
    state = Incumbent(problem)
    try:
        wide_choices.search(state, ReaderShares(problem), 10**6, 0.0)
    except InfeasibleError as error:
        assert not error.proven or best == np.inf
    assert state.bound <= best * (1 + 1e-9) and state.value >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(24))
def test_few_choices_of_equal_layers_and_their_prices_stand_around_the_optimum(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_choices, "SOME", 1 + seed % 2)
    problem = limited(repeated(seed, 12, charged=True), seed)
    try:
        best = solvers.solve(problem, "ilp").objective
    except InfeasibleError:
        best = np.inf
    state, shares, cache = Incumbent(problem), ReaderShares(problem), {"shares": ReaderShares(problem)}
    settled = False
    try:
        settled = portfolio._limited_soon(state, shares, Options(cache=cache), 0.0)
    except InfeasibleError as error:
        assert not error.proven or best == np.inf
    assert state.bound <= best * (1 + 1e-9) and state.value >= best * (1 - 1e-9)
    assert not settled or (state.choice is not None and state.bound > 0.0)


def test_most_limits_on_equal_layers_are_settled_among_few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rounds of shares, and in one solve or two over all choices."""
    exactly, looked = wide_choices.WideChoices.exactly, []
    monkeypatch.setattr(
        wide_choices.WideChoices, "exactly", lambda self, prices: looked.append(0) or exactly(self, prices)
    )
    monkeypatch.setattr(LimitedSearch, "_by_shares", lambda self, multipliers: pytest.fail("shares are not asked"))
    for share in (0.95, 0.8, 0.6):
        problem = replace(layers(60), capacity_bytes=share * 240.0)
        state = Incumbent(problem)
        assert portfolio._limited_soon(state, ReaderShares(problem), Options(), 0.01)
        assert state.gap <= 0.01
    assert len(looked) <= 6


@pytest.mark.parametrize("seed", range(60))
def test_messages_under_prices_are_below_every_plan(seed: int) -> None:
    problem = hub_problem(seed) if seed % 2 else random_problem(seed, most_nodes=5)
    rng = np.random.default_rng(seed)
    multipliers = np.where(rng.random(problem.horizon) < 0.4, rng.random(problem.horizon), 0.0)
    choices = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    beliefs = Beliefs(additive(problem, multipliers))
    for _ in range(6):
        bound = beliefs.round()
        beliefs.shift()
    assert bound <= min(priced(problem, choice, multipliers, 1.0) for choice in choices) * (1 + 1e-9) + 1e-12


def test_tables_that_prices_make_too_large_for_shares_are_tried_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices part layers that are alike without them."""
    problem, count = layers(60), 60
    shares, free = ReaderShares(problem), Incumbent(problem)
    shares.search(free)
    assert free.choice is not None
    state = Incumbent(replace(problem, capacity_bytes=0.8 * 4.0 * count))
    state.offer(free.choice)
    monkeypatch.setattr(LimitedSearch, "_by_shares", lambda self, multipliers: None)
    LimitedSearch(state, shares, 10**7).run()
    assert state.gap <= 0.01


# --- bounds by messages, plans over a few choices, and the clock that exact work looks at ---


SEEDS = st.integers(0, 10**9)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem counts as wide."""
    monkeypatch.setattr(restricted_start, "WIDE", 0)


def stopped() -> Clock:
    clock = Clock()
    clock.stop()
    return clock


def wide(count: int, choices: int, seed: int = 0) -> Problem:
    """A chain of equal nodes in which every value is read by the next two."""
    rng = np.random.default_rng(seed)
    costs, table = rng.random(choices), rng.random((choices, choices))
    every = np.arange(choices)
    nodes = tuple(Node(f"n{n}", costs, np.zeros(choices), (0, 0)) for n in range(count))
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
            solution = solve(problem, "dp", options)
        except InfeasibleError:
            assert best is None or fits
            continue
        assert best is not None
        assert solution.objective == objective(problem, solution.choice) and math.isfinite(solution.objective)
        assert solution.peak_bytes <= problem.capacity_bytes * (1 + 1e-9)
        assert solution.lower_bound <= best.objective * (1 + 1e-9) + 1e-12


@given(SEEDS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_with_time_enough_it_is_the_optimum(narrow: None, seed: int) -> None:
    problem = random_problem(seed, forbid=0.0)
    clock = Clock(1e6)
    solution = solve(problem, "dp", Options(clock=clock))
    assert solution.status == "optimal" and not clock.cut
    assert solution.objective == pytest.approx(brute_force.solve(problem).objective)


def test_the_clock_is_kept_where_exact_elimination_takes_long() -> None:
    problem = wide(30, 160)
    clock = Clock(400.0, timer=Looks())  # a second of work, on any machine the same
    solution = solve(problem, "dp", Options(clock=clock))
    assert clock.seconds < 450.0
    assert clock.cut and solution.status == "cut short"
    assert 0.0 < solution.lower_bound < solution.objective < objective(problem, [0] * 30)


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
    small = restricted_start.narrowed(problem, keep)
    assert len({id(node.seconds) for node in small.nodes}) == 2
    assert len({id(value.source) for value in small.values}) == 1
    assert objective(small, (0, 1, 0, 1, 0, 0)) == objective(problem, (1, 3, 1, 3, 1, 2))
