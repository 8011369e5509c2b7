"""Seeded random choices are valid, differ, repeat, and together reach everything that can be reached."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Problem, objective
from autoshard.solvers.heuristics.random_plans import cover, forced, random_choice
from tests.random_problems import random_problem

SEEDS = st.integers(0, 10**9)


def valid(problem: Problem) -> list[tuple[int, ...]]:
    choices = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    return [choice for choice in choices if math.isfinite(objective(problem, choice))]


@given(SEEDS, st.sampled_from([0.1, 0.4]))
@settings(max_examples=150)
def test_cover_reaches_every_strategy_that_a_valid_choice_can_use(seed: int, forbid: float) -> None:
    problem = random_problem(seed, forbid=forbid)
    choices = valid(problem)
    if not choices:
        with pytest.raises(InfeasibleError):
            random_choice(problem, seed)
        return
    wanted = list(range(len(problem.nodes)))
    found = cover(problem, seed, wanted)
    assert all(math.isfinite(objective(problem, choice)) for choice in found)
    for n in wanted:
        assert {choice[n] for choice in found} == {choice[n] for choice in choices}
    assert found == cover(problem, seed, wanted)


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
