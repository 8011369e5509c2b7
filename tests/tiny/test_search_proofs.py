"""What a whole search says of its plan, whenever the clock runs out: levels, memory limits, contenders, meshes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError
from autoshard.formulation.formulate import formulate
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.problem import Problem
from autoshard.search.memory_fit import named
from autoshard.search.mesh_search import search_meshes
from autoshard.search.objectives import MEMORY, RATIO, SPEED, Levelled, ratio_problem
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.solvers import Clock, Options, solve
from autoshard.solvers.common.result import CUT_SHORT, OPTIMAL, Solution
from autoshard.solvers.common.solver_options import Looks
from autoshard.solvers.relax.lean_plans import minimum_memory_bound
from autoshard.text.plan_summary import certificate_rows
from tests.graphs import mlp_graph

HARDWARE = load_hardware("a100-80g-sxm")
MESH = Mesh.parse("dp=2,tp=2")
GRAPH = mlp_graph(1, 64, 128)


def limits() -> Iterator[int]:
    limit = 0
    while True:
        yield limit
        limit = limit + 1 if limit < 3 else 3 * limit


def optimum(problem: Problem) -> float:
    """inf where nothing fits by the solver's count: some programs may."""
    try:
        found = solve(problem, "ilp")
    except InfeasibleError:
        return math.inf
    assert found.status == OPTIMAL
    return found.objective


def judge(plan: Plan, least_seconds: float, least: float) -> None:
    """`least`: the optimum of what the level minimises; at level 2 the step of any plan."""
    own = plan.certificate
    assert 0.0 <= own.lower_bound_seconds <= least_seconds * (1 + 1e-9)
    assert 0.0 <= own.level_bound <= least * (1 + 1e-9)
    assert own.objective_seconds >= own.lower_bound_seconds and own.level_objective >= own.level_bound
    if own.status == OPTIMAL and plan.search.level != SPEED:
        assert own.level_objective == pytest.approx(least)
    assert (own.status == CUT_SHORT) == plan.search.cut_short
    said = " ".join(text for _, text in certificate_rows(plan))
    assert not ("optimal" in said and plan.search.cut_short)
    for tried in plan.search.candidates:
        if tried.name.startswith("optimum") and plan.search.level == SPEED:
            assert tried.objective_seconds <= least_seconds * (1 + 1e-9)


@pytest.mark.parametrize("level", [RATIO, MEMORY, SPEED])
@pytest.mark.parametrize("share", [math.inf, 0.8])
def test_a_search_that_is_stopped_at_any_look_says_nothing_false(level: int, share: float) -> None:
    free = search(GRAPH, HARDWARE, SearchRequest(MESH))
    limit = free.predicted_peak_bytes * share
    formulation = formulate(GRAPH, MESH, HARDWARE, limit)
    seconds = optimum(formulation.problem)
    least = optimum(ratio_problem(formulation)) if level == RATIO else seconds
    if level == MEMORY:
        least = minimum_memory_bound(formulation.problem)
    if level == SPEED:
        least = free.predicted_seconds
    for number in limits():
        clock = Clock(number, timer=Looks())
        options = Options(clock=clock)
        try:
            plan = search(GRAPH, HARDWARE, SearchRequest(MESH, level=level, memory_limit_bytes=limit), options=options)
        except InfeasibleError:
            if not clock.cut:
                return
            continue
        judge(plan, seconds, least)
        if not clock.cut:
            return


def test_only_what_is_proved_is_called_the_optimum() -> None:
    problem = formulate(GRAPH, MESH, HARDWARE, math.inf).problem
    best = solve(problem)
    for bound, name in ((best.objective, "optimum"), (0.9 * best.objective, "best found"), (-math.inf, "best found")):
        found = Solution(problem, best.choice, bound, "dp")
        assert named(Levelled(found, found.objective, found.lower_bound)) == name


@pytest.mark.parametrize("level", [RATIO, SPEED])
def test_meshes_are_compared_by_the_level(level: int) -> None:
    graph = mlp_graph(1, 24, 1000)
    chosen = search_meshes(graph, HARDWARE, SearchRequest(devices=16, level=level))
    run = [row.mesh for row in chosen.search.meshes if row.predicted_seconds]
    each = [search(graph, HARDWARE, SearchRequest(mesh, level=level)) for mesh in run]
    figures = [p.certificate.level_objective if level == RATIO else p.predicted_seconds for p in each]
    own = chosen.certificate.level_objective if level == RATIO else chosen.predicted_seconds
    assert len(each) > 1 and own == pytest.approx(min(figures))
    if level == RATIO:  # the test would see the step compared instead
        fastest = min(each, key=lambda plan: plan.predicted_seconds)
        assert fastest.certificate.level_objective > own


def test_meshes_cut_short_say_so() -> None:
    for number in limits():
        clock = Clock(number, timer=Looks())
        plan = search_meshes(mlp_graph(1, 64, 64), HARDWARE, SearchRequest(devices=4), options=Options(clock=clock))
        assert plan.search.cut_short == clock.cut == (plan.certificate.status == CUT_SHORT)
        if not clock.cut:
            return
