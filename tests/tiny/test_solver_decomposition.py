"""Values with many readers: messages, shares of readers and cut hubs, against brute force."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard import solvers
from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Node, Problem, Value, objective
from autoshard.solvers import portfolio
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.solver_options import Clock, Options
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import Minimum, minimum_within
from autoshard.solvers.heuristics import brute_force
from autoshard.solvers.relax import hub_relaxation, hubs_apart, reader_shares, reader_terms, wide_choices
from autoshard.solvers.relax.reader_shares import ReaderShares
from tests.random_problems import hub_problem, random_problem

# --- shares of readers: bounds below every plan, plans at the optimum, and the same shares for what is alike ---


@pytest.mark.parametrize("seed", range(40))
def test_each_round_bounds_every_plan(seed: int) -> None:
    problem = (
        hub_problem(seed, forbid=0.0) if seed % 2 else random_problem(seed, most_nodes=6, most_strategies=6, forbid=0.0)
    )
    best = solvers.solve(problem, "exhaustive")
    shares, state = ReaderShares(problem), Incumbent(problem)
    for _ in range(4):
        assert shares.search(state, rounds=1)
        assert state.bound <= best.objective * (1 + 1e-9) <= state.value * (1 + 2e-9)
        for share in shares.shares.values():
            assert (share >= 0).all() and np.allclose(share.sum(axis=0), 1.0)


def agreeing(layers: int) -> Problem:
    """A line in which each value has two readers that want the same layout: even shares pay it once."""
    pair = np.array([[0.0, 1.0], [1.0, 0.0]])
    same = np.array([0, 1])
    nodes = [Node(f"n{i}", np.array([0.1 * (i % 2), 0.2]), np.zeros(2)) for i in range(2 * layers + 1)]
    values = [
        Value(f"v{i}", 2 * i, (2 * i + 1, 2 * i + 2), same, (same, same), pair, np.zeros(2), ((0, 0), (0, 0)))
        for i in range(layers)
    ]
    return Problem(tuple(nodes), tuple(values))


def test_readers_that_agree_leave_no_gap() -> None:
    problem = agreeing(30)
    state = Incumbent(problem)
    assert ReaderShares(problem).search(state)
    assert state.closed and state.value == pytest.approx(objective(problem, [0] * 61))


def test_plans_are_kept_for_other_prices() -> None:
    problem = agreeing(10)
    dearer = replace(problem, values=tuple(replace(v, seconds=3 * v.seconds) for v in problem.values))
    shares = ReaderShares(problem)
    shares.search(Incumbent(problem))
    assert shares.pool
    state = Incumbent(dearer)
    assert shares.search(state, rounds=1) and state.closed


def test_rounds_end_at_a_gap_that_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """More are made where the gap that one leaves is too much, and none where it is near enough."""
    rounds: list[int] = []
    take = ReaderShares.take
    monkeypatch.setattr(ReaderShares, "take", lambda self, *args: (rounds.append(1), take(self, *args)))
    problem = next(p for p in (hub_problem(seed, forbid=0.0) for seed in range(1, 99, 2)) if 0 < _gap(p) < 0.5)
    gap = _gap(problem)
    rounds.clear()
    ReaderShares(problem).search(Incumbent(problem), 3, near=0.9 * gap)
    assert len(rounds) > 1
    rounds.clear()
    ReaderShares(problem).search(Incumbent(problem), 3, near=1.1 * gap)
    assert len(rounds) == 1


def _gap(problem: Problem) -> float:
    """After one round, before choices of rounds are mixed."""
    state = Incumbent(problem)
    shares = ReaderShares(problem)
    minimum = minimum_within(shares.apart(problem), Contents(shares.apart(problem)))
    assert minimum is not None
    state.raise_bound(minimum.bound)
    shares.take(state, minimum.choice, minimum.bound)
    return state.gap


def test_the_makers_of_a_hub_are_chosen_for_its_readers() -> None:
    """Three nodes in a row make a value of many readers: one node after the other no descent changes their layout."""
    same, move = np.array([0, 1]), np.array([[0.0, 5.0], [5.0, 0.0]])
    nodes = [Node(f"m{i}", np.array([0.0, 0.1]), np.zeros(2)) for i in range(3)]
    nodes += [Node(f"r{i}", np.array([9.0, 0.0]), np.zeros(2)) for i in range(12)]
    values = [Value(f"v{i}", i, (i + 1,), same, (same,), move, np.zeros(2), ((0, 0),)) for i in range(2)]
    readers = tuple(range(3, 15))
    values.append(Value("hub", 2, readers, same, (same,) * 12, move, np.zeros(2), ((0, 0),) * 12))
    problem = Problem(tuple(nodes), tuple(values))
    state = Incumbent(problem)
    assert ReaderShares(problem).search(state)
    assert state.value == pytest.approx(0.3)


def views(seed: int, also_read: bool) -> Problem:
    """A table read all over, by a view of it for each of three layers; each view has two readers. `also_read`: views
    read a value of their layer, too."""
    rng = np.random.default_rng(seed)
    layouts = np.arange(2)
    nodes = [Node(f"n{i}", rng.random(2), np.zeros(2)) for i in range(13)]

    def value(producer: int, *readers: int) -> Value:
        move, targets, spans = rng.random((2, 2)), (layouts,) * len(readers), ((0, 0),) * len(readers)
        return Value(f"v{producer}", producer, readers, layouts, targets, move, np.zeros(2), spans)

    values = [value(0, 1, 2, 3), *(value(i, 2 * i + 2, 2 * i + 3) for i in range(1, 4))]
    values += [value(9 + i, i) for i in range(1, 4)] if also_read else []
    return Problem(tuple(nodes), tuple(values))


@pytest.mark.parametrize("seed", range(8))
def test_views_of_what_is_read_all_over_do_not_tie_their_readers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_terms, "MANY", 2)
    separate, shared = views(seed, also_read=True), views(seed, also_read=False)
    assert reader_terms.many(separate) == ({0}, ())
    assert reader_terms.many(shared) == ({0, 1, 2, 3}, (1, 2, 3))
    assert {len(value.consumers) for value in ReaderShares(shared).apart(shared).values} <= {1}
    best, state = solvers.solve(shared, "exhaustive"), Incumbent(shared)
    assert ReaderShares(shared).search(state)
    assert state.bound <= best.objective * (1 + 1e-9) <= state.value * (1 + 2e-9)
    assert solvers.solve(shared).objective == pytest.approx(best.objective)


def test_auto_proves_small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    search = portfolio._search
    monkeypatch.setattr(portfolio, "_search", lambda *args: (called.append(1), search(*args))[1])
    for seed in range(12):
        problem = random_problem(seed, most_nodes=6, most_strategies=6, forbid=0.0)
        solution = solvers.solve(problem)
        assert solution.status == "optimal" and solution.objective == pytest.approx(
            solvers.solve(problem, "exhaustive").objective
        )
    assert called  # some have a gap that shares leave


def test_tables_that_are_too_large_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_shares, "SOON_ENTRIES", 1)
    monkeypatch.setattr(hub_relaxation, "as_messages", lambda problem, least: least)
    problem = hub_problem(3, layers=12, forbid=0.0)
    assert not ReaderShares(problem).search(Incumbent(problem))
    solution = solvers.solve(problem)
    assert solution.lower_bound <= solution.objective


def test_other_prices_are_asked_once_whether_tables_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, seen = [], reader_shares.out_of_reach
    monkeypatch.setattr(reader_shares, "out_of_reach", lambda *args: calls.append(1) or seen(*args))
    problem = agreeing(30)
    dearer = replace(problem, values=tuple(replace(v, seconds=3 * v.seconds) for v in problem.values))
    shares = ReaderShares(problem)
    assert shares.search(Incumbent(problem)) and shares.search(Incumbent(dearer)) and len(calls) == 1


def test_where_tables_no_longer_fit_shares_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = agreeing(30)
    shares = ReaderShares(problem)
    assert shares.search(Incumbent(problem))
    monkeypatch.setattr(reader_shares, "minimum_within", lambda *args, **also: None)
    answers = iter([True])
    monkeypatch.setattr(reader_shares, "out_of_reach", lambda *args: next(answers))
    assert not shares.search(Incumbent(problem)) and next(answers, None) is None


def test_around_hubs_shares_have_the_tables_that_messages_would_pass_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SOON_ENTRIES": 1, "FORESEEN": 10**6}.items():
        monkeypatch.setattr(reader_shares, name, value)
    problem = hub_problem(3, layers=12, forbid=0.0)
    assert ReaderShares(problem).cut
    state = Incumbent(problem)
    assert ReaderShares(problem).search(state) and 0 < state.bound <= state.value * (1 + 1e-9)
    assert ReaderShares(agreeing(30)).budget == 1  # exact tables are as small


def test_a_small_gap_is_searched_under_a_clock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, called = hub_problem(3, layers=12, forbid=0.0), []
    choice = solvers.solve(problem).choice

    def near(_: ReaderShares, state: Incumbent, *__: object) -> bool:
        state.offer(choice)
        state.raise_bound(objective(problem, choice) * 0.997)
        return True

    monkeypatch.setattr(ReaderShares, "search", near)
    for exact in ("_exact_soon", "_hubs_apart"):
        monkeypatch.setattr(portfolio, exact, lambda *_: False)
    monkeypatch.setattr(portfolio, "FEW_CHOICES", 0)
    monkeypatch.setattr(portfolio, "_search", lambda *_: called.append(1))
    solvers.solve(problem)
    assert not called
    solvers.solve(problem, options=Options(Clock(60.0)))
    assert called


# --- values that are read all over a problem whose exact tables are too large, against brute force ---


SEEDS = st.integers(0, 10**9)
FIXTURE = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each node few choices are looked at first."""
    monkeypatch.setattr(hub_relaxation, "_FEW", (2, 1))


def every(problem: Problem) -> dict[tuple[int, ...], float]:
    choices = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    return {choice: objective(problem, choice) for choice in choices}


def optimum(problem: Problem) -> float:
    try:
        return brute_force.solve(problem).objective
    except InfeasibleError:
        return float("inf")


@pytest.mark.slow
@given(SEEDS, st.booleans())
@settings(max_examples=300, suppress_health_check=FIXTURE)
def test_bounds_and_plans_around_hubs_are_true(narrow: None, seed: int, hub: bool) -> None:
    problem = hub_problem(seed) if hub else random_problem(seed, forbid=0.05)
    best = optimum(problem)
    minimum = None
    if np.isfinite(best):
        minimum = hub_relaxation.bounded(Incumbent(problem), Clock())
    if minimum is not None:
        assert minimum.bound <= best + 1e-9 * abs(best)
        assert best <= objective(problem, minimum.choice) + 1e-9 * abs(best)


def test_most_hubs_are_closed(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tables that the whole problem does not fit into, but what is left of it does."""
    closed = []
    for seed in range(60):
        problem = hub_problem(seed, layers=6, forbid=0.0)
        best = optimum(problem)
        solution = solvers.solve(problem, "auto", Options(budget_entries=40))
        assert solution.lower_bound <= best + 1e-9 and best <= solution.objective + 1e-9
        closed.append(solution.objective <= best * (1 + 1e-9) and solution.lower_bound >= 0.97 * best)
    assert np.mean(closed) > 0.8


def test_a_rough_plan_is_good_and_what_did_not_fit_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    whole = portfolio.minimum_within

    def counted(problem: Problem, *args: object, **more: object) -> object:
        tried.append(portfolio.structure(problem))
        return whole(problem, *args, **more)  # type: ignore[arg-type]

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


# --- exact but for values with many readers: bounds below every plan, and readers that agree ---


@pytest.fixture
def narrow_of_hubs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value with three readers is a hub."""
    monkeypatch.setattr(reader_terms, "MANY", 2)


@given(SEEDS, st.booleans())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bounds_and_plans_are_true(narrow_of_hubs_apart: None, seed: int, hub: bool) -> None:
    problem = hub_problem(seed) if hub else random_problem(seed, most_nodes=6, most_strategies=4)
    state, shares = Incumbent(problem), ReaderShares(problem)
    try:
        best = solvers.solve(problem, "exhaustive").objective
    except InfeasibleError:
        best = math.inf
    try:
        searched = hubs_apart.search(state, shares)
    except InfeasibleError:
        assert math.isinf(best)
        return
    assert searched == bool(shares.cut)
    assert state.bound <= best * (1 + 1e-9) and state.value >= best * (1 - 1e-9)


def split_readers(layers: int = 12) -> Problem:
    """Layers in a row that all read one value, in one of two layouts: each costs 3 to make, once, and the other one
    saves each odd layer 0.2. What makes the value can leave it in either, for nothing: shares say that both are."""
    two = np.array([0, 1])
    nodes = [Node("hub", np.zeros(2), np.zeros(2))]
    nodes += [Node(f"n{i}", np.array([0.2 * (i % 2), 0.1]), np.zeros(2)) for i in range(layers)]
    make = np.array([[0.0, 3.0], [3.0, 0.0]])
    values = [Value("hub", 0, tuple(range(1, layers + 1)), two, (two,) * layers, make, np.zeros(2), ((0, 0),) * layers)]
    free = np.zeros((2, 2))
    values += [Value(f"v{i}", i, (i + 1,), two, (two,), free, np.zeros(2), ((0, 0),)) for i in range(1, layers)]
    return Problem(tuple(nodes), tuple(values))


def test_readers_that_differ_for_little_agree() -> None:
    problem = split_readers()
    solution = solvers.solve(problem)
    assert solution.objective == pytest.approx(1.2) and solution.status == "optimal"
    assert len({solution.choice[c] for c in problem.values[0].consumers}) == 1


def tied(seed: int = 4, layers: int = 12) -> Problem:
    """Equal layers in a row: the value between two has three readers in the next, and all read the hub, for little."""
    rng = np.random.default_rng(seed)
    three, one = np.arange(3), ((0, 0),)
    costs, moves = rng.random((4, 3)), rng.random((4, 3, 3))
    nodes = [Node("hub", np.zeros(3), np.zeros(3))]
    nodes += [Node(f"n{i}", costs[i % 4], np.zeros(3)) for i in range(4 * layers)]
    cheap = 1e-3 * rng.random((3, 3))
    values = [
        Value("hub", 0, tuple(range(2, 4 * layers + 1, 4)), three, (three,) * layers, cheap, np.zeros(3), one * layers)
    ]
    for first in range(1, 4 * layers, 4):
        readers = (first + 1, first + 2, first + 3)
        values.append(Value(f"v{first}", first, readers, three, (three,) * 3, moves[0], np.zeros(3), one * 3))
        values += [
            Value(f"v{first + k}", first + k, (first + k + 1,), three, (three,), moves[k], np.zeros(3), one)
            for k in (1, 2, 3)
            if first + k + 1 < len(nodes)
        ]
    return Problem(tuple(nodes), tuple(values))


def test_what_has_few_readers_leaves_no_gap_beside_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shares of all values leave one that is searched on for: the proof takes no other tables than its own."""
    problem, state = tied(), Incumbent(tied())
    assert ReaderShares(problem).search(state) and state.gap > portfolio.ROUGHLY
    monkeypatch.setattr(portfolio, "FEW_CHOICES", 0)
    monkeypatch.setattr(portfolio, "SOME", 0)
    monkeypatch.setattr(portfolio, "_search", lambda *_: pytest.fail("searched on"))
    solution = solvers.solve(problem)
    assert solution.objective < state.value * (1 + 1e-9)
    assert solution.objective < solution.lower_bound * (1 + portfolio.ROUGHLY)


def test_where_nodes_have_few_choices_hubs_are_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small exact tables come first, and large ones aren't begun; a rough plan and one under a limit take neither."""
    budgets: list[int] = []

    def counted(*args: Any, budget_entries: int, **more: Any) -> Minimum | None:
        budgets.append(budget_entries)
        return minimum_within(*args, budget_entries=budget_entries, **more)

    monkeypatch.setattr(portfolio, "minimum_within", counted)
    problem = tied()
    solution = solvers.solve(problem)
    assert solution.status == "optimal" and budgets == [portfolio.SMALL_ENTRIES]
    budgets.clear()
    solvers.solve(problem, options=Options(rough=True))
    assert not budgets
    solvers.solve(replace(problem, capacity_bytes=1.0))
    assert portfolio.SMALL_ENTRIES not in budgets


@pytest.mark.slow
@given(SEEDS, st.integers(1, 3))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_many_choices_plans_and_bounds_beside_hubs_are_true(
    narrow_of_hubs_apart: None, monkeypatch: pytest.MonkeyPatch, seed: int, few: int
) -> None:
    monkeypatch.setattr(wide_choices, "SOME", few)
    problem = hub_problem(seed) if seed % 2 else random_problem(seed, most_nodes=6, most_strategies=4)
    try:
        best = solvers.solve(problem, "exhaustive").objective
    except InfeasibleError:
        best = math.inf
    state = Incumbent(problem)
    with contextlib.suppress(InfeasibleError):
        wide_choices.search(state, ReaderShares(problem), 10**6, 0.0)
    assert state.bound <= best * (1 + 1e-9) and state.value >= best * (1 - 1e-9)


def test_beside_hubs_many_choices_take_messages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither shares nor exact tables of all choices, whatever gap is left; the plan is the best there is."""
    problem = tied()
    best = solvers.solve(problem)
    monkeypatch.setattr(portfolio, "FEW_CHOICES", 0)
    monkeypatch.setattr(portfolio, "SOME", 0)
    monkeypatch.setattr(portfolio, "worthwhile", lambda _: True)
    monkeypatch.setattr(wide_choices, "SOME", 2)
    monkeypatch.setattr(ReaderShares, "search", lambda *_: pytest.fail("shares"))
    monkeypatch.setattr(portfolio, "_search", lambda *_: pytest.fail("searched on"))
    solution = solvers.solve(problem)
    assert best.status == "optimal" and solution.objective == pytest.approx(best.objective)
    assert 0 < solution.lower_bound <= best.objective * (1 + 1e-9)
