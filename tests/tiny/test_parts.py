"""Cost parts add up to the objective and the peak; a runner-up costs what it is said to cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.cost_breakdown import alternatives, parts
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import memory, objective
from autoshard.solvers.heuristics import random_plans
from tests.graphs import mlp_graph
from tests.random_problems import random_problem
from tests.rule_graphs import gpt

HARDWARE = load_hardware("a100-80g-sxm")


@given(st.integers(0, 10**9))
@settings(max_examples=200, deadline=None)
def test_a_flip_costs_the_difference_of_the_objectives(seed: int) -> None:
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    choice = [int(rng.integers(len(node.seconds))) for node in problem.nodes]
    before = objective(problem, choice)
    if math.isinf(before):
        return
    for n, totals in enumerate(alternatives(problem, choice)):
        for s, total in enumerate(totals):
            after = objective(problem, [*choice[:n], s, *choice[n + 1 :]])
            assert after == pytest.approx(before - totals[choice[n]] + total, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_parts_add_up(model: str, seed: int) -> None:
    graph = mlp_graph(2, 64, 64) if model == "mlp" else gpt(1, 4, 16, 96, 12, 97)
    formulation = formulate(PlanningContext(graph, Mesh.parse("dp=2,tp=2"), HARDWARE))
    problem = formulation.problem
    choice = random_plans.random_choice(problem, seed)
    all_parts = parts(formulation, choice)
    seconds = sum(part.compute_seconds + part.communication_seconds for part in all_parts)
    assert seconds == pytest.approx(objective(problem, choice), rel=1e-9)
    assert sum(part.memory_bytes for part in all_parts) == pytest.approx(float(memory(problem, choice).max()))
    assert all(0 <= part.repeated_seconds <= part.compute_seconds for part in all_parts)
    for n, part in enumerate(all_parts):
        if part.runner_up:
            offered = [str(x) for x in formulation.sites[n].strategies or formulation.sites[n].layouts]
            others = [[*choice[:n], s, *choice[n + 1 :]] for s in range(len(offered)) if s != choice[n]]
            best = min(others, key=lambda other: objective(problem, other))
            extra = objective(problem, best) - objective(problem, choice)
            assert part.runner_up_seconds == pytest.approx(extra, rel=1e-6, abs=1e-12)
