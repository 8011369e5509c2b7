"""Levels against brute force: every combination of a tiny problem, evaluated without the code under test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import solvers
from autoshard.cluster.hardware import load_hardware
from autoshard.costs.operator import compute_seconds
from autoshard.errors import InfeasibleError, UsageError
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.layout import Shard, largest_shape
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Problem, memory, objective
from autoshard.search.objectives import (
    MEMORY,
    RATIO,
    SPEED,
    level_value,
    parse_level,
    ratio_problem,
    smallest_memory,
    solve_level,
)
from autoshard.solvers.common.result import Solution
from tests.graphs import mlp_graph
from tests.random_problems import random_problem

HARDWARE = load_hardware("a100-80g-sxm")
Solver = Callable[[Problem], Solution]


def solver(name: str) -> Solver:
    return lambda problem: solvers.solve(problem, name)


def every(problem: Problem) -> list[tuple[int, ...]]:
    choices = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    return [choice for choice in choices if math.isfinite(objective(problem, choice))]


@pytest.fixture(scope="module", params=[(64, 2), (2, 512), (1024, 1024)], ids=str)
def formulation(request: pytest.FixtureRequest) -> Formulation:
    batch, hidden = request.param
    return formulate(PlanningContext(mlp_graph(1, batch, hidden), Mesh.parse("tp=4"), HARDWARE))


def by_hand(formulation: Formulation, choice: tuple[int, ...]) -> float:
    """Level 0 from the definition: the objective, less the work that no other device does."""
    graph, mesh = formulation.graph, formulation.mesh
    total = objective(formulation.problem, choice)
    for site, node, s in zip(formulation.sites, formulation.problem.nodes, choice, strict=True):
        if site.kind == "parameter":
            total -= float(node.seconds[s]) / (1 if isinstance(site.layouts[s].placements[0], Shard) else 4)
        if site.kind == "op":
            op, strategy = graph.by_op[site.name], site.strategies[s]
            pairs = [*zip(op.operands, strategy.operands, strict=True), *zip(op.results, strategy.results, strict=True)]
            locals_ = [
                LocalTensor(largest_shape(graph.tensor(n).shape, lay, mesh), "float32", graph.tensor(n).requires_grad)
                for n, lay in pairs
            ]
            operands, results = locals_[: len(op.operands)], locals_[len(op.operands) :]
            seconds = sum(compute_seconds(HARDWARE, graph, op, tuple(operands), tuple(results), strategy.variant))
            total -= seconds / (1 if strategy.choices[0].kind == "factor" else 4)
    return total


@pytest.mark.parametrize("name", ["dp", "ilp", "exhaustive"])
def test_ratio_is_the_least_communication_and_repeated_work(formulation: Formulation, name: str) -> None:
    result = solve_level(formulation, RATIO, math.inf, solver(name))
    ratio = ratio_problem(formulation)
    assert result.objective == pytest.approx(by_hand(formulation, result.solution.choice), abs=1e-12)
    assert result.objective == pytest.approx(exhaustive_minimum(ratio), rel=1e-9)
    assert result.bound <= result.objective
    assert result.solution.objective == objective(formulation.problem, result.solution.choice)
    rng = np.random.default_rng(0)
    for _ in range(200):
        choice = tuple(int(rng.integers(len(node.seconds))) for node in ratio.nodes)
        assert objective(ratio, choice) == pytest.approx(by_hand(formulation, choice), abs=1e-12)


def exhaustive_minimum(problem: Problem) -> float:
    return solvers.solve(problem, "exhaustive").objective


@pytest.mark.parametrize("name", ["dp", "ilp", "exhaustive"])
def test_memory_is_the_smallest_peak_and_the_fastest_of_these(formulation: Formulation, name: str) -> None:
    result = solve_level(formulation, MEMORY, math.inf, solver(name))
    choices = every(formulation.problem)
    least = min(float(memory(formulation.problem, choice).max()) for choice in choices)
    assert result.objective == result.solution.peak_bytes == least
    assert result.bound <= least
    fastest = min(objective(formulation.problem, c) for c in choices if memory(formulation.problem, c).max() <= least)
    assert result.solution.objective == pytest.approx(fastest, rel=1e-9)


@pytest.mark.parametrize("name", ["dp", "ilp", "exhaustive"])
def test_speed_is_the_least_seconds(formulation: Formulation, name: str) -> None:
    result = solve_level(formulation, SPEED, math.inf, solver(name))
    assert result.objective == pytest.approx(exhaustive_minimum(formulation.problem), rel=1e-9)


@pytest.mark.parametrize("level", [RATIO, MEMORY, SPEED])
def test_the_capacity_holds_in_every_level(formulation: Formulation, level: int) -> None:
    least = solve_level(formulation, MEMORY, math.inf, solver("exhaustive")).objective
    most = solve_level(formulation, SPEED, math.inf, solver("exhaustive")).solution.peak_bytes
    for capacity in (least, (least + most) / 2):
        result = solve_level(formulation, level, capacity, solver("dp"))
        assert result.solution.peak_bytes <= capacity * (1 + 1e-9)
        assert result.objective == pytest.approx(level_value(formulation, level, result.solution.choice))
    with pytest.raises(InfeasibleError):
        solve_level(formulation, level, least * 0.9, solver("dp"))


@given(st.integers(0, 10**9), st.sampled_from(["dp", "exhaustive"]))
@settings(max_examples=60, deadline=None)
def test_least_memory_of_random_problems(seed: int, name: str) -> None:
    problem = random_problem(seed, most_nodes=5, most_strategies=3)
    choices = every(problem)
    if not choices:
        with pytest.raises(InfeasibleError):
            smallest_memory(problem, solver(name))
        return
    result = smallest_memory(problem, solver(name))
    least = min(float(memory(problem, choice).max()) for choice in choices)
    assert result.bound <= least + 1e-9
    assert result.objective == memory(problem, result.solution.choice).max() >= least
    if name == "exhaustive":
        assert result.objective == least
        same = [objective(problem, choice) for choice in choices if memory(problem, choice).max() <= least]
        assert result.solution.objective == pytest.approx(min(same), abs=1e-9)


@given(st.integers(0, 10**9))
@settings(max_examples=40, deadline=None)
def test_a_poor_solver_has_a_valid_bound(seed: int) -> None:
    """One that fits but never takes the leanest plan: what is claimed must not depend on it."""
    problem = random_problem(seed, most_nodes=5, most_strategies=3)
    choices = every(problem)
    peaks = [float(memory(problem, choice).max()) for choice in choices]
    if len(set(peaks)) < 2:
        return

    def poor(limited: Problem) -> Solution:
        fitting = [p for p in peaks if min(peaks) < p <= limited.capacity_bytes]
        if not fitting:
            raise InfeasibleError("none")
        choice = choices[peaks.index(min(fitting))]
        return Solution(problem, choice, 0.0, "poor")

    result = smallest_memory(problem, poor)
    assert result.bound <= min(peaks) + 1e-9 < result.objective


def test_names_of_levels() -> None:
    assert [parse_level(text) for text in ("0", "ratio", "1", "memory", "2", "speed")] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(UsageError, match=r"expected 0 \(ratio\), 1 \(memory\) or 2"):
        parse_level("3")
