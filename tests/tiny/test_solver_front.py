"""What holds for every solver: bad problems are refused with one sentence, pins are kept."""

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
from autoshard.solvers import SOLVERS, Options, solve
from tests.random_problems import limited, random_problem

SEEDS = st.integers(0, 10**9)
CHECKED = sorted(SOLVERS)


def pair(**changes: object) -> Problem:
    """Two nodes, one value; `changes` go to the value."""
    own, two = np.arange(2), np.ones(2)
    value = Value("v", 0, (1,), own, (own,), np.zeros((2, 2)), two, ((0, 1),))
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


@pytest.mark.parametrize("solver", CHECKED)
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
        found = solve(problem, solver, Options(pinned=pinned))
    except InfeasibleError as error:
        assert not fitting or not error.proven
        return
    assert found.choice in fitting
    assert found.objective == objective(problem, found.choice)
    assert found.lower_bound <= best * (1 + 1e-9) + 1e-9
    assert found.status != "optimal" or math.isclose(found.objective, best, rel_tol=1e-9, abs_tol=1e-9)
