"""No false proof, whenever the clock runs out: every solver on random problems against brute force, look by look."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autoshard import solvers
from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Problem, memory, objective
from autoshard.solvers import Clock, Options, portfolio
from autoshard.solvers.common.incumbent import Incumbent
from autoshard.solvers.common.result import CUT_SHORT, OPTIMAL, FalseProof, Solution, proved
from autoshard.solvers.common.seen_plans import SeenPlans
from autoshard.solvers.relax import hub_relaxation, restricted_start, wide_choices
from autoshard.solvers.relax.reader_shares import ReaderShares
from tests.looks import Looks
from tests.random_problems import hub_problem, limited, random_problem
from tests.slow import quick_at

FIRST = 12  # limits that are tried one by one; then each is 1.4 times the last
MOST = 4000
STILL = 20  # looks after the last: of those who are told in turn
SOLVERS = ("auto", "dp", "ilp", "propagation", "recursive")


def limits() -> Iterator[int]:
    limit = 0
    while limit < MOST:
        yield limit
        limit = limit + 1 if limit < FIRST else int(1.4 * limit)


def oracle(problem: Problem) -> float:
    """The least objective of a plan that fits; inf where there is none."""
    try:
        return solvers.solve(problem, "exhaustive").objective
    except InfeasibleError:
        return math.inf


def judge(problem: Problem, best: float, solution: Solution) -> None:
    assert solution.objective == pytest.approx(objective(problem, solution.choice), rel=1e-12)
    assert memory(problem, solution.choice).max(initial=0.0) <= problem.capacity_bytes * (1 + 1e-9)
    assert 0.0 <= solution.lower_bound <= best * (1 + 1e-9) + 1e-12
    assert (solution.status == OPTIMAL) == (solution.lower_bound == solution.objective)
    if solution.status == OPTIMAL:
        assert solution.objective == pytest.approx(best, rel=1e-8, abs=1e-12)


def judged_at_every_look(problem: Problem, solver: str, options: Options | None = None) -> None:
    best, options = oracle(problem), options or Options()
    for limit in limits():
        clock = Clock(limit, timer=Looks())
        try:
            solution = solvers.solve(problem, solver, replace(options, clock=clock))
        except InfeasibleError as error:
            assert math.isinf(best) or not error.proven
            if not clock.cut:
                return
            continue
        judge(problem, best, solution)
        assert solution.status != CUT_SHORT or clock.cut
        if not clock.cut:
            return


def problems(count: int) -> Iterator[Problem]:
    for seed in range(count):
        wide = random_problem(seed, most_nodes=5, most_strategies=8, forbid=0.1 * (seed % 2))
        problem = hub_problem(seed) if seed % 3 == 2 else wide
        yield limited(problem, seed) if seed % 4 < 2 else problem


@pytest.mark.parametrize("solver", quick_at(SOLVERS, 3))
def test_no_solver_proves_what_is_not_whenever_it_is_stopped(solver: str) -> None:
    for problem in problems(30 if solver != "ilp" else 12):
        judged_at_every_look(problem, solver)


@pytest.mark.parametrize("budget", quick_at([1, 200], 0))
def test_nor_where_no_tables_fit(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(hub_relaxation, "_FEW", (2, 1))
    for problem in problems(15):
        judged_at_every_look(problem, "dp", Options(budget_entries=budget))


@pytest.mark.slow
def test_nor_where_nodes_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restricted_start, "WIDE", 0)
    for problem in problems(15):
        judged_at_every_look(problem, "dp")


def only_few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tables of all but narrowed problems were too large."""
    search, whole = ReaderShares.search, {}

    def small(self: ReaderShares, state: Incumbent, *more: float) -> bool:
        sizes = tuple(len(node.seconds) for node in state.problem.nodes)
        most = whole.setdefault(tuple(node.name for node in state.problem.nodes), sizes)
        return sizes != most and search(self, state, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(ReaderShares, "search", small)
    monkeypatch.setattr(portfolio, "_exact_soon", lambda state, options: False)
    monkeypatch.setattr(restricted_start, "WIDE", 0)
    monkeypatch.setattr(wide_choices, "SOME", 1)


@pytest.mark.parametrize("seed", quick_at(range(16), 0, 3, 6, 7, 12))
def test_nor_where_messages_choose(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    only_few_choices(monkeypatch)
    problem = list(problems(seed + 1))[-1]
    judged_at_every_look(problem, "auto")


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_clock_is_kept_all_along(solver: str) -> None:
    """Whenever it ends, nobody goes on looking at it: all leave off, and what is left to do looks at nothing."""
    longest, cases = 0, (hub_problem(3, layers=12), random_problem(5, most_nodes=40, forbid=0.0))
    for problem in (*cases, limited(random_problem(11, most_nodes=30, forbid=0.05), 11)):
        for limit in limits():
            looks = Looks()
            clock = Clock(limit, timer=looks)
            solvers.solve(problem, solver, Options(clock=clock, budget_entries=400))
            assert looks.number <= limit + STILL
            if not clock.cut:
                break
        longest = max(longest, limit)
    assert longest > 100 or solver in ("propagation", "recursive")  # so that there was something to look at


# --- one place for bound and status, and the door where every answer is checked ---------------------------------------


def test_a_bound_that_is_none_says_nothing_and_one_above_the_plan_is_refused() -> None:
    assert proved(3.0, -math.inf) == 0.0 == proved(3.0, -1.0)
    assert proved(3.0, 3.0 - 1e-10) == 3.0 == proved(3.0, 3.0 + 1e-10)
    assert proved(3.0, 2.9) == 2.9
    for value, bound in ((3.0, 3.1), (3.0, math.inf), (3.0, math.nan), (math.inf, math.inf), (math.inf, 0.0)):
        with pytest.raises(FalseProof):
            proved(value, bound)


def tight_and_slow() -> tuple[Problem, tuple[int, ...], tuple[int, ...]]:
    """A problem with its best plan, and a worse one."""
    problem = random_problem(7, most_nodes=4, forbid=0.0)
    best = solvers.solve(problem, "exhaustive").choice
    every = np.ndindex(*(len(node.seconds) for node in problem.nodes))
    worst = max(every, key=lambda choice: objective(problem, choice))
    assert objective(problem, worst) > objective(problem, best)
    return problem, best, tuple(int(s) for s in worst)


def test_a_proof_can_not_be_given_to_another_plan() -> None:
    problem, best, worst = tight_and_slow()
    value = objective(problem, best)
    solution = Solution(problem, best, value, "dp", cut=True)
    assert (solution.objective, solution.status, solution.cut) == (value, OPTIMAL, False)
    with pytest.raises(ValueError, match="problem"):
        replace(solution, choice=worst)
    assert Solution(problem, worst, value, "dp").status == "feasible"
    assert Solution(problem, worst, value, "dp", cut=True).status == CUT_SHORT


def test_what_a_solver_says_is_checked_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, best, worst = tight_and_slow()
    other = replace(problem, nodes=tuple(replace(node, seconds=node.seconds + 1.0) for node in problem.nodes))
    tight = replace(problem, capacity_bytes=float(memory(problem, worst).max()) - 1.0)

    def says(said: Problem, choice: tuple[int, ...], bound: float, requested: Problem = problem) -> None:
        monkeypatch.setitem(solvers.SOLVERS, "dp", lambda p, o: Solution(said, choice, bound, "dp"))
        solvers.solve(requested, "dp")

    says(problem, best, 0.0)
    for case in (
        (other, best, 0.0),
        (problem, best, math.nan),
        (problem, best, math.inf),
        (problem, worst, 0.0, tight),
    ):
        with pytest.raises(FalseProof):
            says(*case)


def test_a_bound_is_compared_with_every_plan_ever_seen() -> None:
    problem, best, worst = tight_and_slow()
    low, high = objective(problem, best), objective(problem, worst)
    for order in (1, -1):
        seen = SeenPlans()
        first, second = [Solution(problem, best, 0.0, "dp"), Solution(problem, worst, high, "false")][::order]
        seen.add(problem, first)
        with pytest.raises(FalseProof, match=r"false: a lower bound of .* stands above a plan"):
            seen.add(problem, second)
    seen, peak = SeenPlans(), float(memory(problem, best).max())
    seen.add(replace(problem, capacity_bytes=peak - 1.0), Solution(problem, worst, high, "within less memory"))
    seen.add(problem, Solution(problem, best, 0.5 * low, "dp"))  # which `best` does not fit
    assert seen.bound(problem, peak) == 0.5 * low and seen.bound(problem, peak - 1.0) == high
