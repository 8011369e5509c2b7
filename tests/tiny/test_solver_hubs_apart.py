"""Exact but for values that are read all over: bounds below every plan, and readers that agree, against brute force."""

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
from autoshard.solvers.common.solver_options import Options
from autoshard.solvers.elimination.minimise import Minimum, minimum_within
from autoshard.solvers.relax import hubs_apart, reader_terms, wide_choices
from autoshard.solvers.relax.reader_shares import ReaderShares
from tests.random_problems import hub_problem, random_problem

SEEDS = st.integers(0, 10**9)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value with three readers is a hub, and a gap of any size is open."""
    monkeypatch.setattr(reader_terms, "MANY", 2)
    monkeypatch.setattr(hubs_apart, "ROUGHLY", 0.0)


@given(SEEDS, st.booleans())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bounds_and_plans_are_true(narrow: None, seed: int, hub: bool) -> None:
    problem = hub_problem(seed) if hub else random_problem(seed, most_nodes=6, most_strategies=4)
    state, shares = Incumbent(problem), ReaderShares(problem)
    try:
        best = solvers.solve(problem, "exhaustive").objective
    except InfeasibleError:
        best = math.inf
    try:
        found = hubs_apart.search(state, shares)
    except InfeasibleError:
        assert math.isinf(best)
        return
    assert found == bool(shares.cut)
    assert state.bound <= best * (1 + 1e-9) and state.value >= best * (1 - 1e-9)


@given(SEEDS)
@settings(max_examples=100)
def test_no_plan_costs_more_than_where_all_are_to_agree(seed: int) -> None:
    """Of plans that leave hubs at the same source: all that is left out is what the one free layout of each costs."""
    problem = hub_problem(seed, forbid=0.0)
    hub = problem.values[0]
    rng = np.random.default_rng(seed)
    choice = tuple(int(rng.integers(len(node.seconds))) for node in problem.nodes)
    part = hubs_apart.agreeing(problem, {0}, choice)
    taken = [int(target[choice[c]]) for c, target in zip(hub.consumers, hub.targets, strict=True)]
    free = max(sorted(set(taken)), key=taken.count)
    source = hub.source[choice[0]]
    for other in itertools.product(*(range(len(node.seconds)) for node in problem.nodes)):
        if hub.source[other[0]] == source:
            most = objective(part, other) + hub.seconds[source, free]
            assert objective(problem, other) <= most + 1e-9 * abs(most)


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


def test_readers_that_differ_for_little_are_made_to_agree() -> None:
    problem = split_readers()
    state = Incumbent(problem)
    assert hubs_apart.search(state, ReaderShares(problem))
    assert state.value == pytest.approx(1.2) and state.choice is not None
    assert len({state.choice[c] for c in problem.values[0].consumers}) == 1


def tied(seed: int = 4, layers: int = 12) -> Problem:
    """Equal layers in a row: the value between two has three readers in the next, and all read the hub, for little."""
    rng = np.random.default_rng(seed)
    three, one = np.arange(3), ((0, 0),)
    own, moves = rng.random((4, 3)), rng.random((4, 3, 3))
    nodes = [Node("hub", np.zeros(3), np.zeros(3))]
    nodes += [Node(f"n{i}", own[i % 4], np.zeros(3)) for i in range(4 * layers)]
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
    assert ReaderShares(problem).search(state) and state.gap > portfolio._LOOSE_SHARES
    monkeypatch.setattr(portfolio, "_FEW_CHOICES", 0)
    monkeypatch.setattr(portfolio, "_NARROW", 0)
    monkeypatch.setattr(portfolio, "_search", lambda *_: pytest.fail("searched on"))
    found = solvers.solve(problem)
    assert found.objective < state.value * (1 + 1e-9)
    assert found.objective < found.lower_bound * (1 + portfolio._LOOSE_SHARES)


def test_where_nodes_have_few_choices_hubs_are_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small exact tables come first, and large ones aren't begun; a rough plan and one under a limit take neither."""
    budgets: list[int] = []

    def counted(*given: Any, budget_entries: int, **more: Any) -> Minimum | None:
        budgets.append(budget_entries)
        return minimum_within(*given, budget_entries=budget_entries, **more)

    monkeypatch.setattr(portfolio, "minimum_within", counted)
    problem = tied()
    found = solvers.solve(problem)
    assert found.status == "optimal" and budgets == [portfolio._NARROW_ENTRIES]
    budgets.clear()
    solvers.solve(problem, options=Options(rough=True))
    assert not budgets
    solvers.solve(replace(problem, capacity_bytes=1.0))
    assert portfolio._NARROW_ENTRIES not in budgets


@given(SEEDS, st.integers(1, 3))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_many_choices_plans_and_bounds_beside_hubs_are_true(
    narrow: None, monkeypatch: pytest.MonkeyPatch, seed: int, few: int
) -> None:
    monkeypatch.setattr(wide_choices, "_FEW", few)
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
    monkeypatch.setattr(portfolio, "_FEW_CHOICES", 0)
    monkeypatch.setattr(portfolio, "_NARROW", 0)
    monkeypatch.setattr(portfolio, "suits", lambda _: True)
    monkeypatch.setattr(wide_choices, "_FEW", 2)
    monkeypatch.setattr(ReaderShares, "search", lambda *_: pytest.fail("shares"))
    monkeypatch.setattr(portfolio, "_search", lambda *_: pytest.fail("searched on"))
    found = solvers.solve(problem)
    assert best.status == "optimal" and found.objective == pytest.approx(best.objective)
    assert 0 < found.lower_bound <= best.objective * (1 + 1e-9)
