"""The integer program, and what its relaxation says of single choices."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import InfeasibleError, UsageError
from autoshard.ir.problem import Floats, Problem, memory, objective
from autoshard.solvers import Clock, Options, portfolio, solve
from autoshard.solvers.common.clock import Pace
from autoshard.solvers.common.result import Solution
from autoshard.solvers.elimination import least_excess
from autoshard.solvers.elimination.dominance import finite
from autoshard.solvers.elimination.least_excess import LeastExcess, beaten
from autoshard.solvers.heuristics import brute_force
from autoshard.solvers.ilp import branch_and_bound, pulp_engine
from autoshard.solvers.linear_program.highs_engine import Highs
from autoshard.solvers.linear_program.memory_constraints import MemoryRows, expected
from autoshard.solvers.linear_program.reduced_costs import excess
from autoshard.solvers.linear_program.rows import linear, pairs
from autoshard.solvers.relax.memory_presolve import overflows
from autoshard.solvers.relax.trws_layouts import message_bound
from autoshard.units import ROUNDING
from tests.random_problems import limited, random_problem
from tests.tiny.test_solver_dp import blocks, chain, close

# --- the ilp solver and its engines against brute force and dp; what they say when they are stopped ---


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


def check(problem: Problem, solution: Solution | None) -> None:
    expected_ = best(problem)
    assert (solution is None) == (expected_ is None)
    if solution is not None and expected_ is not None:
        assert solution.status == "optimal"
        assert close(solution.objective, expected_.objective)
        assert solution.objective == objective(problem, solution.choice) == solution.lower_bound
        assert solution.peak_bytes == memory(problem, solution.choice).max(initial=0.0) <= problem.capacity_bytes


@given(SEEDS, st.sampled_from([0.0, 0.1, 0.4]), st.booleans(), st.booleans())
@settings(max_examples=400)
def test_ilp_is_optimal(seed: int, forbid: float, start: bool, limit: bool) -> None:
    problem = random_problem(seed, forbid=forbid)
    problem = limited(problem, seed) if limit else problem
    check(problem, attempt(problem, start=start))


@pytest.mark.parametrize("engine", ["pulp:CBC", "pulp:HiGHS", "pulp"])
def test_pulp_solves_the_same_problem(engine: str) -> None:
    for seed in range(4 if engine == "pulp:CBC" else 12):  # a process each
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
        allowed = finite(problem)
    except InfeasibleError:
        return
    plan = best(replace(problem, capacity_bytes=math.inf))
    if plan is None:
        return
    model = linear(problem, allowed)
    highs = Highs(model, Clock(), plan.objective, Pace(2))
    relaxed = highs.relax()
    assert relaxed is not None
    assert relaxed.bound <= plan.objective * (1 + 1e-9) + 1e-9
    rng = np.random.default_rng(seed)
    choice = tuple(int(rng.choice(some)) for some in allowed)
    columns = model.columns_of(choice)
    fixed = linear(problem, [np.array([s]) for s in choice])
    x = np.zeros(model.choices)
    x[columns] = 1.0
    assert model.picked(x) == choice
    if math.isfinite(objective(problem, choice)):
        one = Highs(fixed, Clock(), 1.0, Pace(2)).relax()
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
        highs = Highs(model, Clock(), 1.0, Pace(2))
        highs.add(MemoryRows(limit, model, len(model.cost)).rows(range(limit.horizon)))
        assert (highs.relax() is not None) == fits


@given(SEEDS)
@settings(max_examples=200)
def test_the_bound_of_one_round_is_below_every_plan(seed: int) -> None:
    problem = random_problem(seed)
    solution = best(problem)
    if solution is not None:
        assert message_bound(problem) <= solution.objective * (1 + 1e-12) + 1e-12


def test_the_bound_of_one_round_is_exact_for_a_chain() -> None:
    problem = chain(4, [3.0, 1.0], np.array([[0.0, 5.0], [5.0, 1.0]]))
    assert close(message_bound(problem), solve(problem, "exhaustive").objective)


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
    solution = solve(problem, "ilp", Options(clock=stopped(), engine=engine))
    assert solution.lower_bound <= expected_ * (1 + 1e-9) <= solution.objective * (1 + 2e-9)
    assert solution.status == "cut short" or close(solution.lower_bound, solution.objective)


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
    highs = Highs(model, Late(), 1.0, Pace(2))
    relaxed = highs.relax()
    assert highs.solver.getInfo().simplex_iteration_count < 100
    assert relaxed is None or relaxed.bound <= portfolio.solve(blocks(40)).objective


# --- what a choice costs beyond the bound: never more than the truth, and more than its own reduced cost says ---


@given(st.integers(0, 10**9))
@settings(max_examples=150)
def test_excess_is_below_every_plan_with_the_choice(seed: int) -> None:
    problem = random_problem(seed, most_nodes=5)
    try:
        allowed = finite(problem)
    except InfeasibleError:
        return
    model = linear(problem, allowed)
    relaxed = Highs(model, Clock(), 1.0, Pace(2)).relax()
    if relaxed is None:
        return
    more = excess(model, relaxed.reduced)
    assert (more >= np.maximum(relaxed.reduced[: model.choices], 0.0)).all()
    for choice in itertools.product(*allowed):
        value = objective(problem, choice)
        if math.isfinite(value):
            assert relaxed.bound + more[model.columns_of(choice)].max() <= value * (1 + 1e-9) + 1e-9


def test_trees_say_more_than_reduced_costs() -> None:
    problem = blocks(8)
    model = linear(problem, finite(problem))
    best = portfolio.solve(problem).objective
    relaxed = Highs(model, Clock(), best, Pace(2)).relax()
    assert relaxed is not None
    gap = 1.005 * best - relaxed.bound
    by_trees = (excess(model, relaxed.reduced) <= gap).sum()
    assert by_trees < (relaxed.reduced[: model.choices] <= gap).sum()


# --- what a row costs more than another at the least: by a few columns first, and the same as over all of them ---


def table(rng: np.random.Generator, rows: int, columns: int, forbid: float) -> Floats:
    """Distances between places, as of layouts, with repeated and forbidden rows and entries."""
    pay = np.abs(rng.integers(0, 30, rows)[:, None] - rng.integers(0, 30, columns)).astype(float)
    pay[rng.random(pay.shape) < forbid] = np.inf
    pay[rng.random(rows) < forbid / 4] = np.inf
    return pay


def over_all(pay: Floats) -> Floats:
    """[a, b], by its definition."""
    with np.errstate(invalid="ignore"):
        excess = np.where(np.isinf(pay)[:, None, :], np.inf, pay[:, None, :] - pay[None, :, :])
    least: Floats = excess.min(axis=2)
    return least


@pytest.mark.parametrize("forbid", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(20))
def test_what_few_columns_tell_is_what_all_tell(seed: int, forbid: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_excess, "SLAB", 70 if seed % 2 else 1000)  # below the size of any table
    rng = np.random.default_rng(seed)
    pays = [table(rng, 20, columns, forbid)[:, rng.integers(0, columns, columns)] for columns in (5, 17, 40)]
    costs, row = rng.integers(0, 4, 30).astype(float), [rng.integers(0, 20, 30) for _ in range(3)]
    base = -np.abs(rng.integers(0, 3, (20, 20))).astype(float)
    parts = [LeastExcess(pays[:1]), LeastExcess(pays[1:], clipped=True), LeastExcess([], base)]
    whole = [over_all(pays[0]), sum(np.minimum(over_all(pay), 0.0) for pay in pays[1:]), base]
    with np.errstate(invalid="ignore"):
        expected = costs[:, None] - costs + sum(least[np.ix_(r, r)] for least, r in zip(whole, row, strict=True)) >= 0
        np.fill_diagonal(expected, False)
    assert np.array_equal(beaten(costs, list(zip(parts, row, strict=True))), expected)
    for part, least in zip(parts, whole, strict=True):
        assert (part.most >= least).all()
        assert np.array_equal(part.whole, least)


def test_rows_that_differ_are_not_looked_at_over_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    of_pairs = least_excess._of_pairs
    monkeypatch.setattr(least_excess, "_of_pairs", lambda pay, a, b: looked.append(len(a)) or of_pairs(pay, a, b))
    monkeypatch.setattr(least_excess, "_of_all", lambda pay: pytest.fail("all pairs over all columns"))
    places = np.arange(80.0)
    distances = np.abs(places[:, None] - places)
    dominated = beaten(np.append(np.zeros(79), 200.0), [(LeastExcess([distances]), np.arange(80))])
    assert dominated[79, :79].all()
    assert not dominated[:79].any()
    assert sum(looked) <= 2 * 80


def test_columns_that_are_equal_are_looked_at_once() -> None:
    pay = table(np.random.default_rng(3), 30, 7, 0.1)
    (merged,) = LeastExcess([np.repeat(pay, 50, axis=1)]).tables
    assert np.array_equal(merged, pay) and np.array_equal(LeastExcess([merged]).whole, over_all(pay))


def test_a_choice_whose_bound_is_the_best_value_but_for_rounding_stays() -> None:
    """An optimum may be one of them: it is no worse than the plan at hand."""
    problem = random_problem(1)
    model = linear(problem, [np.arange(len(node.seconds)) for node in problem.nodes])
    search = branch_and_bound._IntegerSearch(problem, Clock(math.inf), best=tuple(0 for _ in problem.nodes))
    more = np.full(model.choices, 1.0 + ROUNDING / 2)
    assert [ids.tolist() for ids in search.within(model, more, 1.0)] == [ids.tolist() for ids in model.alive]
    assert [ids.tolist() for ids in search.within(model, more * (1 + 2 * ROUNDING), 1.0)] == [[0]] * len(model.alive)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12),
    st.sets(st.integers(0, 11)),
)
def test_every_window_that_overflows_has_one_time(alive: list[int], known: set[int]) -> None:
    problem = replace(random_problem(1), capacity_bytes=3.0)
    requested = [t for t in known if t < len(alive)]
    times = overflows(problem, np.array(alive, dtype=float), requested)
    assert all(alive[t] > 3 for t in times) and not {*times} & {*requested}
    assert [alive[t] for t in times] == sorted((alive[t] for t in times), reverse=True)
    most = max(alive)
    if most > 3 and not requested:
        assert alive[times[0]] == most
