"""What holds for every solver, and for the heuristics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import InfeasibleError, UsageError
from autoshard.ir.problem import Node, Problem, Value, memory, objective
from autoshard.solvers import SOLVERS, Clock, Options, portfolio, solve
from autoshard.solvers.common.arc_consistency import Fences
from autoshard.solvers.common.memory_repair import repaired
from autoshard.solvers.heuristics import bisection, brute_force
from autoshard.solvers.heuristics.propagation import Conflict, propagate
from autoshard.solvers.heuristics.random_plans import forced, random_choice
from tests.random_problems import limited, random_problem
from tests.slow import quick_at
from tests.tiny.test_solver_dp import blocks, chain

# --- what holds for every solver: bad problems are refused with one sentence, pins are kept ---


SEEDS = st.integers(0, 10**9)
CHECKED = sorted(SOLVERS)


def pair(**changes: object) -> Problem:
    """Two nodes, one value; `changes` go to the value."""
    ids, two = np.arange(2), np.ones(2)
    value = Value("v", 0, (1,), ids, (ids,), np.zeros((2, 2)), two, ((0, 1),))
    nodes = (Node("a", two, two), Node("b", two, two))
    return Problem(nodes, (replace(value, **changes),))  # type: ignore[arg-type]


def with_node(**changes: object) -> Problem:
    problem = pair()
    return replace(problem, nodes=(problem.nodes[0], replace(problem.nodes[1], **changes)))  # type: ignore[arg-type]


NAN = float("nan")
BAD: list[tuple[Callable[[], Problem], str]] = [
    (lambda: with_node(seconds=np.array([1.0, NAN])), "b: a cost is nan, expected 0 or more"),
    (lambda: with_node(seconds=np.array([1.0, -2.0])), "b: a cost is -2.0"),
    (lambda: with_node(bytes=np.array([1.0, -2.0])), "b: a size is -2.0 bytes"),
    (lambda: with_node(bytes=np.array([1.0, math.inf])), "b: a size is inf bytes"),
    (lambda: with_node(bytes=np.ones(3)), "b: 2 choices but sizes of shape"),
    (lambda: with_node(seconds=np.zeros(0), bytes=np.zeros(0)), "b: its set of choices is empty"),
    (lambda: with_node(interval=(0, 7)), r"b: alive over \(0, 7\)"),
    (lambda: pair(seconds=np.array([[0.0, NAN], [0.0, 0.0]])), "v: a cost is nan"),
    (lambda: pair(seconds=np.array([[0.0, -1.0], [0.0, 0.0]])), "v: a cost is -1.0"),
    (lambda: pair(bytes=np.array([0.0, NAN])), "v: a size is nan bytes"),
    (lambda: pair(bytes=np.zeros(3)), "v: 2 target layouts but sizes"),
    (lambda: pair(source=np.array([0, 2])), "v: source layouts 0 to 2, expected 0 to 1"),
    (lambda: pair(targets=(np.array([-1, 0]),)), "v: target layouts -1 to 0"),
    (lambda: pair(targets=(np.arange(3),)), "v: its layouts don't match"),
    (lambda: pair(consumers=(5,)), r"v: its nodes are \[0, 5\]"),
    (lambda: pair(consumers=(0,)), "v: its nodes are .* different consumers"),
    (lambda: pair(consumers=(), targets=(), intervals=()), "v: its nodes are"),
    (lambda: pair(intervals=((0, 9),)), r"v: alive over \(0, 9\)"),
    (lambda: replace(pair(), capacity_bytes=NAN), "capacity is nan"),
    (lambda: replace(pair(), capacity_bytes=-1.0), "capacity is -1.0"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_problems_are_refused(number: int) -> None:
    make, message = BAD[number]
    for solver in CHECKED:
        with pytest.raises(UsageError, match=message) as caught:
            solve(make(), solver)
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("pinned", [{2: 0}, {-1: 0}, {0: 2}, {0: -1}])
def test_pins_that_do_not_exist_are_refused(pinned: dict[int, int]) -> None:
    with pytest.raises(UsageError, match="pinned"):
        solve(pair(), "dp", Options(pinned=pinned))


def test_pins_that_exclude_each_other_are_named() -> None:
    tied = pair(seconds=np.array([[0.0, math.inf], [math.inf, 0.0]]))
    for solver in CHECKED:
        with pytest.raises(InfeasibleError, match="pinned: a, b"):
            solve(tied, solver, Options(pinned={0: 0, 1: 1}))


@pytest.mark.parametrize("solver", quick_at(CHECKED, 2, 4))
@given(SEEDS)
@settings(max_examples=40)
def test_pins_hold_in_every_solver(solver: str, seed: int) -> None:
    problem = limited(random_problem(seed, most_nodes=5, forbid=0.05), seed)
    rng = np.random.default_rng(seed)
    picked = [n for n in range(len(problem.nodes)) if rng.random() < 0.4]
    pinned = {n: int(rng.integers(len(problem.nodes[n].seconds))) for n in picked}
    every = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    fitting = [
        choice
        for choice in every
        if all(choice[n] == s for n, s in pinned.items())
        and math.isfinite(objective(problem, choice))
        and memory(problem, choice).max() <= problem.capacity_bytes
    ]
    best = min((objective(problem, choice) for choice in fitting), default=math.inf)
    try:
        solution = solve(problem, solver, Options(pinned=pinned))
    except InfeasibleError as error:
        assert not fitting or not error.proven
        return
    assert solution.choice in fitting
    assert solution.objective == objective(problem, solution.choice)
    assert solution.lower_bound <= best * (1 + 1e-9) + 1e-9
    assert solution.status != "optimal" or math.isclose(solution.objective, best, rel_tol=1e-9, abs_tol=1e-9)


# --- seeded random choices are valid, differ, and repeat ---


def valid(problem: Problem) -> list[tuple[int, ...]]:
    choices = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    return [choice for choice in choices if math.isfinite(objective(problem, choice))]


@given(SEEDS, st.sampled_from([0.1, 0.4]))
@settings(max_examples=150)
def test_a_random_choice_is_valid_where_there_is_one(seed: int, forbid: float) -> None:
    problem = random_problem(seed, forbid=forbid)
    choices = valid(problem)
    if not choices:
        with pytest.raises(InfeasibleError):
            random_choice(problem, seed)
        return
    assert random_choice(problem, seed) in choices


@given(SEEDS)
@settings(max_examples=100)
def test_pins_hold_or_are_named(seed: int) -> None:
    problem = random_problem(seed, forbid=0.4)
    choices = valid(problem)
    last = len(problem.nodes) - 1
    for s in range(len(problem.nodes[last].seconds)):
        if any(choice[last] == s for choice in choices):
            choice = forced(problem, {last: s}, seed)
            assert choice[last] == s and math.isfinite(objective(problem, choice))
        else:
            with pytest.raises(InfeasibleError, match=f"{problem.nodes[last].name} = {s}"):
                forced(problem, {last: s}, seed)


def test_seeds_repeat_and_differ() -> None:
    problem = random_problem(12, most_nodes=6, forbid=0.0)
    assert len(problem.nodes) > 2
    picks = [random_choice(problem, seed) for seed in range(30)]
    assert picks == [random_choice(problem, seed) for seed in range(30)]
    assert len(set(picks)) > 15


# --- propagation and recursive bisection: valid, never below the optimum, their bound never above it; repair ---


OWN = np.arange(2)


@pytest.mark.parametrize("solver", ["propagation", "recursive"])
@given(SEEDS, st.sampled_from([0.0, 0.1, 0.3]))
@settings(max_examples=150)
def test_plans_are_valid_and_bounds_hold(solver: str, seed: int, forbid: float) -> None:
    problem = random_problem(seed, forbid=forbid)
    problem = limited(problem, seed) if seed % 2 else problem
    try:
        solution = solve(problem, solver)
    except InfeasibleError as error:
        if error.proven:
            with pytest.raises(InfeasibleError):
                brute_force.solve(problem)
        return
    best = brute_force.solve(problem)
    assert solution.lower_bound <= best.objective * (1 + 1e-9) + 1e-9
    assert best.objective <= solution.objective * (1 + 1e-9) + 1e-9
    assert solution.objective == objective(problem, solution.choice) < math.inf
    assert solution.peak_bytes == memory(problem, solution.choice).max() <= problem.capacity_bytes
    assert solution.choice == solve(problem, solver).choice


@pytest.mark.parametrize(("solver", "most_worse"), [("propagation", 1.7), ("recursive", 1.1)])
def test_plans_are_not_far_from_the_best(solver: str, most_worse: float) -> None:
    for count in (3, 20):
        problem = blocks(count)
        assert solve(problem, solver).objective <= most_worse * portfolio.solve(problem).objective


def test_one_window_is_exact() -> None:
    for seed in range(60):
        problem = random_problem(seed, forbid=0.0)
        assert math.isclose(solve(problem, "recursive").objective, solve(problem, "exhaustive").objective, abs_tol=1e-9)


def test_windows_with_equal_content_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: dict[int, int] = {}
    plain = bisection.minimise
    for count in (200, 800):
        solved[count] = 0

        def counted(*args: object, count: int = count, **kwargs: object) -> object:
            solved[count] += 1
            return plain(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(bisection, "minimise", counted)
        bisection.bisected(blocks(count, 4), 0.0, Clock())
    assert solved[800] < 2 * solved[200], "four times the blocks have few new windows"


def test_recursive_is_stopped_by_the_clock() -> None:
    clock = Clock()
    clock.stop()
    solution = solve(blocks(60), "recursive", Options(clock=clock))
    assert math.isfinite(solution.objective) and solution.status == "cut short"


# --- propagation ----------------------------------------------------------------------------------------------------


def path(costs: list[list[float]], move: float = 1.0) -> Problem:
    """Nodes in a row; a value moves for `move` where the two choices differ."""
    table = move * (1.0 - np.eye(2))
    nodes = tuple(Node(f"n{i}", np.array(c), np.zeros(2)) for i, c in enumerate(costs))
    values = tuple(
        Value(f"v{i}", i, (i + 1,), OWN, (OWN,), table, np.zeros(2), ((0, 0),)) for i in range(len(costs) - 1)
    )
    return Problem(nodes, values)


def test_pins_spread_by_least_redistribution() -> None:
    """Choice 0 is cheaper everywhere, but moving nothing comes first; ties are broken by a node's own cost."""
    result = propagate(path([[1.0, 3.0]] * 4), {1: 1})
    assert result.choice == (1, 1, 1, 1)
    assert result.decided == ("propagated", "pinned", "propagated", "propagated") and not result.conflicts
    assert propagate(path([[1.0, 3.0], [2.0, 1.0]], move=0.0), {0: 1}).choice == (1, 1)
    assert propagate(path([[1.0, 3.0], [1.0, 2.0]], move=0.0), {0: 1}).choice == (1, 0)


def test_between_two_pins_the_cheapest_is_taken_and_reported() -> None:
    result = propagate(path([[0.0, 0.0], [0.0, 5.0], [0.0, 0.0]]), {0: 1, 2: 0})
    assert result.choice == (1, 0, 0) and result.decided == ("pinned", "conflict", "pinned")
    assert result.conflicts == (Conflict(1, (0, 2), (1, 0), (1.0, 0.0), 0),)


def test_without_pins_it_starts_at_the_costliest_node() -> None:
    result = propagate(path([[1.0, 1.2], [9.0, 8.0], [1.0, 1.2]]), {})
    assert result.decided == ("propagated", "start", "propagated") and result.choice == (1, 1, 1)


def test_parts_that_hang_together_by_nothing_start_each() -> None:
    problem = path([[2.0, 1.0]] * 2)
    apart = Problem((*problem.nodes, Node("alone", np.array([3.0, 2.0]), np.zeros(2))), problem.values)
    assert sorted(propagate(apart, {}).decided) == ["propagated", "start", "start"]
    assert propagate(apart, {0: 0}).decided == ("pinned", "propagated", "start")


def test_a_value_already_made_for_another_consumer_is_free() -> None:
    move = np.array([[0.0, 4.0], [9.0, 9.0]])
    nodes = (Node("a", np.zeros(1), np.zeros(1)), *(Node(n, np.array([1.0, 0.0]), np.zeros(2)) for n in "bc"))
    value = Value("v", 0, (1, 2), np.array([0]), (OWN, OWN), move, np.zeros(2), ((0, 0), (0, 0)))
    assert propagate(Problem(nodes, (value,)), {0: 0}).choice == (0, 0, 0)
    assert propagate(Problem(nodes, (value,)), {0: 0, 1: 1}).choice == (0, 1, 1)


def test_choices_that_would_strand_a_node_are_not_taken() -> None:
    """n1 would rather follow the pin, but then the last node has no partner."""
    problem = path([[0.0, 0.0]] * 3)
    only = np.array([[0.0, np.inf], [0.0, np.inf]])
    stuck = replace(problem.values[1], seconds=np.array([[np.inf, 0.0], [0.0, 0.0]]))
    assert propagate(replace(problem, values=(problem.values[0], stuck)), {0: 0, 2: 0}).choice == (0, 1, 0)
    wall = replace(problem.values[1], seconds=only)
    with pytest.raises(InfeasibleError, match="n1: none of its 2 strategies"):
        propagate(replace(problem, values=(problem.values[0], wall)), {2: 1})


def test_fences_follow_what_is_decided() -> None:
    tie = np.array([[0.0, np.inf], [np.inf, 0.0]])
    fences = Fences(chain(5, [1.0, 1.0], tie))
    assert all(flag.all() for flag in fences.flags)
    fences.fix(2, 1)
    assert [flag.tolist() for flag in fences.flags] == [[False, True]] * 5


# --- repair ---------------------------------------------------------------------------------------------------------


@given(SEEDS)
@settings(max_examples=200)
def test_a_repaired_plan_fits(seed: int) -> None:
    problem = limited(random_problem(seed), seed)
    rng = np.random.default_rng(seed)
    choice = [int(rng.integers(len(node.seconds))) for node in problem.nodes]
    fixed = repaired(problem, choice)
    if fixed is not None:
        assert memory(problem, fixed).max() <= problem.capacity_bytes
        assert math.isfinite(objective(problem, fixed)) or math.isinf(objective(problem, choice))
    if memory(problem, choice).max() <= problem.capacity_bytes:
        assert fixed == tuple(choice)


def test_the_cheapest_byte_goes_first() -> None:
    two = np.array([4.0, 0.0])
    nodes = tuple(Node(n, np.array([0.0, cost]), two, (0, 1)) for n, cost in (("a", 5.0), ("b", 1.0), ("c", 3.0)))
    assert repaired(Problem(nodes, (), 8.0), (0, 0, 0)) == (0, 1, 0)
    assert repaired(Problem(nodes, (), 4.0), (0, 0, 0)) == (0, 1, 1)
    assert repaired(Problem(nodes, (), 0.0), (0, 0, 0)) == (1, 1, 1)
    fixed = (*nodes, Node("d", np.zeros(1), np.ones(1), (0, 1)))
    assert repaired(Problem(fixed, (), 0.0), (0, 0, 0, 0)) is None


def test_repair_is_often_enough() -> None:
    tried = fits = 0
    for seed in range(150):
        problem = limited(random_problem(seed, forbid=0.0), seed)
        try:
            brute_force.solve(problem)
        except InfeasibleError:
            continue
        tried += 1
        fits += repaired(problem, portfolio.solve(replace(problem, capacity_bytes=math.inf)).choice) is not None
    assert tried > 80 and fits >= 0.9 * tried
