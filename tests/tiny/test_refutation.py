"""A solver's word that nothing is allowed or fits is told as proven only where an argument of another kind shows it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from autoshard import solvers
from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Problem, memory, objective
from autoshard.solvers import Options, refutation
from autoshard.solvers.common.result import Solution
from autoshard.solvers.refutation import priced
from autoshard.solvers.relax.low_memory_plans import minimum_memory_bound
from autoshard.solvers.relax.memory_columns import condensed
from tests.graphs import mlp_graph
from tests.random_problems import limited, random_problem
from tests.slow import slow

CLAIMING = ("auto", "dp", "ilp")


def choices(problem: Problem) -> list[tuple[int, ...]]:
    """All that are allowed."""
    every = itertools.product(*(range(len(node.seconds)) for node in problem.nodes))
    return [choice for choice in every if math.isfinite(objective(problem, choice))]


def least_peak(problem: Problem) -> float:
    return min((float(memory(problem, choice).max()) for choice in choices(problem)), default=math.inf)


def claims(problem: Problem, options: Options) -> Solution:
    """A solver that is wrong."""
    raise InfeasibleError("no plan fits: every plan needs at least 1 B more")


@pytest.mark.parametrize("count", [True, False])
@pytest.mark.parametrize("solver", CLAIMING)
def test_a_false_claim_is_not_told_as_proven(solver: str, count: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not count:
        monkeypatch.setattr(refutation, "SLAB", 0)
    monkeypatch.setitem(solvers.SOLVERS, solver, claims)
    for seed in range(12):
        problem = limited(random_problem(seed, most_nodes=4), seed)
        possible = math.isfinite(least := least_peak(problem)) and least <= problem.capacity_bytes
        with pytest.raises(InfeasibleError) as caught:
            solvers.solve(problem, solver)
        assert not (possible and caught.value.proven)
        assert caught.value.proven or "not proven: one method alone" in caught.value.message


@pytest.mark.parametrize("count", [True, slow(False)])
@pytest.mark.parametrize("solver", CLAIMING)
def test_true_claims_stay_proven(solver: str, count: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All where combinations are counted; without that most, by the other arguments."""
    if not count:
        monkeypatch.setattr(refutation, "SLAB", 0)
    proven: list[bool] = []
    for seed in range(32):
        problem = random_problem(seed, most_nodes=4)
        least = least_peak(problem)
        if 0 < least < math.inf:
            small = replace(problem, capacity_bytes=0.97 * least)
            with pytest.raises(InfeasibleError) as claim:
                solvers.SOLVERS[solver](small, Options())
            with pytest.raises(InfeasibleError) as caught:
                solvers.solve(small, solver)
            proven += [caught.value.proven] if claim.value.proven else []
    assert len(proven) > 15 and sum(proven) >= (len(proven) if count else 0.7 * len(proven))


def test_prices_bound_the_bytes_of_every_plan() -> None:
    """The least priced bytes are at most those of each plan, and forbidden is what was."""
    for seed in range(30):
        problem = condensed(random_problem(seed, most_nodes=4))
        prices = np.random.default_rng(seed).random(problem.horizon)
        sum_ = priced(problem, prices)
        allowed = set(choices(problem))
        for choice in itertools.product(*(range(len(node.seconds)) for node in problem.nodes)):
            paid = objective(sum_, choice)
            assert math.isfinite(paid) == (choice in allowed)
            assert math.isinf(paid) or paid <= float(prices @ memory(problem, choice)) * (1 + 1e-9) + 1e-12


def test_of_a_model_by_its_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the solver's bound, which is above what the smallest sizes need; nothing is counted."""
    problem = formulate(
        PlanningContext(mlp_graph(3, 16, 32), Mesh.parse("dp=2,tp=2"), load_hardware("h100-80g-sxm"))
    ).problem
    calls: list[str] = []
    by_program = refutation._by_program
    monkeypatch.setattr(refutation, "_by_program", lambda *args: calls.append("program") or by_program(*args))
    bound = minimum_memory_bound(problem)
    for share in (0.5, 0.999):
        with pytest.raises(InfeasibleError, match="no plan fits: every plan needs") as caught:
            solvers.solve(replace(problem, capacity_bytes=share * bound))
        assert caught.value.proven
    assert solvers.solve(replace(problem, capacity_bytes=1.5 * bound)).peak_bytes <= 1.5 * bound
