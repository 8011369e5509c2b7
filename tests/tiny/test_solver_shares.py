"""Shares of readers: bounds below every plan, plans at the optimum, and the same shares for what is alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard import solvers
from autoshard.ir.problem import Node, Problem, Value, objective
from autoshard.solvers import portfolio
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.solver_options import Clock, Options
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import minimum_within
from autoshard.solvers.relax import hub_relaxation, reader_shares, reader_terms
from autoshard.solvers.relax.reader_shares import ReaderShares
from tests.random_problems import hub_problem, random_problem


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
        for own in shares.shares.values():
            assert (own >= 0).all() and np.allclose(own.sum(axis=0), 1.0)


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
    monkeypatch.setattr(ReaderShares, "take", lambda self, *given: (rounds.append(1), take(self, *given)))
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
    found = minimum_within(shares.apart(problem), Contents(shares.apart(problem)))
    assert found is not None
    state.raise_bound(found.bound)
    shares.take(state, found.choice, found.bound)
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
    own, shared = views(seed, also_read=True), views(seed, also_read=False)
    assert reader_terms.many(own) == ({0}, ())
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
        found = solvers.solve(problem)
        assert found.status == "optimal" and found.objective == pytest.approx(
            solvers.solve(problem, "exhaustive").objective
        )
    assert called  # some have a gap that shares leave


def test_tables_that_are_too_large_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_shares, "_ENTRIES", 1)
    monkeypatch.setattr(hub_relaxation, "as_messages", lambda problem, least: least)
    problem = hub_problem(3, layers=12, forbid=0.0)
    assert not ReaderShares(problem).search(Incumbent(problem))
    found = solvers.solve(problem)
    assert found.lower_bound <= found.objective


def test_other_prices_are_asked_once_whether_tables_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = [], reader_shares.out_of_reach
    monkeypatch.setattr(reader_shares, "out_of_reach", lambda *given: asked.append(1) or seen(*given))
    problem = agreeing(30)
    dearer = replace(problem, values=tuple(replace(v, seconds=3 * v.seconds) for v in problem.values))
    shares = ReaderShares(problem)
    assert shares.search(Incumbent(problem)) and shares.search(Incumbent(dearer)) and len(asked) == 1


def test_where_tables_no_longer_fit_more_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = agreeing(30)
    shares = ReaderShares(problem)
    assert shares.search(Incumbent(problem))
    monkeypatch.setattr(reader_shares, "minimum_within", lambda *given, **also: None)
    answers = iter([True, False])
    monkeypatch.setattr(reader_shares, "out_of_reach", lambda *given: next(answers))
    monkeypatch.setattr(ReaderShares, "cut_more", lambda self: cut.append(1) or True)
    cut: list[int] = []
    assert not shares.search(Incumbent(problem)) and cut == [1] and next(answers, None) is None


def test_around_hubs_shares_have_the_tables_that_messages_would_pass_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_ENTRIES": 1, "_FORESEEN": 10**6, "_FORESEEN_CUT": 10**6}.items():
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
    monkeypatch.setattr(portfolio, "_FEW_CHOICES", 0)
    monkeypatch.setattr(portfolio, "_search", lambda *_: called.append(1))
    solvers.solve(problem)
    assert not called
    solvers.solve(problem, options=Options(Clock(60.0)))
    assert called
