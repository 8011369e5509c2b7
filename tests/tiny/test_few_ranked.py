"""Few choices of each node by messages over one of several equal blocks, and plans over these."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard import solvers
from autoshard.ir.problem import objective
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.elimination.compress_blocks import shortened
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.weighted_sum import additive
from autoshard.solvers.relax import low_memory_plans
from autoshard.solvers.relax.low_memory_plans import LowMemoryPlans
from autoshard.solvers.relax.memory_columns import column_of
from autoshard.solvers.relax.reader_shares import ReaderShares
from autoshard.solvers.relax.restricted_start import narrowed, solve_top_k, top_k_choices
from tests.random_problems import random_problem
from tests.tiny.test_solver_fold import chain_of, repeated

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
def test_few_choices_are_the_same_of_each_block(seed: int) -> None:
    problem = repeated(seed, 12)
    few = top_k_choices(problem, 2)
    if few is None:
        return
    for node, best in zip(problem.nodes, few, strict=True):
        assert len(best) == min(2, len(node.seconds)) and (np.diff(best) > 0).all() and best.max() < len(node.seconds)
    fewer = narrowed(problem, few)
    assert shortened(additive(fewer), Contents(fewer)) is not None  # blocks are as equal as they were
    every = top_k_choices(problem, 99)
    assert every is not None and all(len(best) == len(n.seconds) for best, n in zip(every, problem.nodes, strict=True))
    least = solvers.solve(problem, "dp").objective
    assert solvers.solve(narrowed(problem, every), "dp").objective == pytest.approx(least)
    assert solvers.solve(fewer, "dp").objective >= least * (1 - 1e-9)


def test_most_random_problems_with_blocks_are_ranked() -> None:
    assert sum(top_k_choices(repeated(seed, 12), 2) is not None for seed in SEEDS) >= len(SEEDS) // 2


def test_one_choice_of_each_node_of_a_chain_is_its_minimum() -> None:
    """Where no node has rivals messages find the plan itself."""
    problem = chain_of(40, copies=True)
    few = top_k_choices(problem, 1)
    assert few is not None
    assert objective(problem, [int(best[0]) for best in few]) == pytest.approx(solvers.solve(problem, "dp").objective)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_least_of_few_is_a_plan_and_with_all_choices_the_minimum(seed: int) -> None:
    problem = repeated(seed, 12)
    solution, least = solve_top_k(problem, 10**6, 2), solvers.solve(problem, "dp").objective
    if solution is None:
        return
    assert solution.value == pytest.approx(objective(problem, solution.choice)) and solution.value >= least * (1 - 1e-9)
    every = solve_top_k(problem, 10**6, 99)
    assert every is not None and every.value == pytest.approx(least)


def test_where_nothing_repeats_there_is_none() -> None:
    assert solve_top_k(random_problem(3, most_nodes=6, most_strategies=6, forbid=0.0), 10**6) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_sketched_search_leaves_plans_and_no_bound(seed: int) -> None:
    problem = repeated(seed, 12)
    exact, sketched = Incumbent(problem), Incumbent(problem)
    assert top_k_choices(ReaderShares(problem).apart(problem), 6) is not None
    assert ReaderShares(problem).search(exact, 2) and ReaderShares(problem).search(sketched, 2, sketched=True)
    assert sketched.choice is not None and sketched.bound == 0 < exact.bound
    assert exact.bound <= sketched.value == pytest.approx(objective(problem, sketched.choice))


@pytest.mark.parametrize("seed", SEEDS)
def test_lean_plans_of_much_work_are_found_over_few_choices(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where exact tables are large none are made: the plan at a rate is one, and near that of all choices."""
    problem = repeated(seed, 12)
    exact = LowMemoryPlans(problem).at_rate(1.0)
    monkeypatch.setattr(low_memory_plans, "MUCH_WORK", 0)
    lean = LowMemoryPlans(problem)
    monkeypatch.setattr(lean, "_least", lambda _: pytest.fail("exact tables"))
    lean_choice = lean.at_rate(1.0)
    assert exact is not None and lean_choice is not None
    multipliers = lean._multipliers(1.0)
    least, approx = (column_of(lean.problem, choice) for choice in (exact, lean_choice))
    priced = [column.seconds + float(multipliers @ column.bytes) for column in (least, approx)]
    assert priced[0] * (1 - 1e-9) <= priced[1] <= 1.1 * priced[0]
