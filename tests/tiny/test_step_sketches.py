"""Plans and weights that guide the search, over few choices of each node or with a part of all costs: never a bound."""

from __future__ import annotations

import pytest

from autoshard import solvers
from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.formulation.step_resources import in_a_row, step_resources
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import objective
from autoshard.search import shortest_step
from autoshard.search.shortest_step import StepSearch
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.heuristics.random_plans import random_choice
from autoshard.solvers.relax.restricted_start import Near
from tests.graphs import mlp_graph
from tests.tiny.test_step_bound import MESHES, SIZES, Counted, made, plans, step_seconds


def deep(mesh: str) -> Formulation:
    graph = mlp_graph(layers=12, batch=64, hidden=256)
    return formulate(PlanningContext(graph, Mesh.parse(mesh), load_hardware("h100-80g-sxm")))


def test_weights_are_found_over_few_choices_and_one_bound_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    formulation = deep("dp=2,tp=2")
    exact = StepSearch(formulation)
    first = exact.first()
    assert first is not None
    whole = exact.bound([first])

    monkeypatch.setattr(shortest_step, "MUCH_WORK", 0)
    monkeypatch.setattr(shortest_step, "solve_top_k", few := Counted(shortest_step.solve_top_k))
    search = StepSearch(formulation)
    assert search.sketched
    search.first()
    bound = search.bound([first])
    assert few.first and bound.seconds >= 0.98 * whole.seconds and len(bound.tried) > len(few.first)
    least = solvers.solve(search.leading.bounding(bound.weights), "dp").objective
    assert bound.seconds == pytest.approx(least + float(bound.weights @ search.leading.constants))
    for choice in (first, random_choice(formulation.problem, 0)):
        assert bound.seconds <= step_seconds(formulation, choice)


def test_few_choices_never_make_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the choices of one bad plan the least is what that one takes: above the step of a good one."""
    formulation = deep("dp=2,tp=2")
    search = StepSearch(formulation)
    first = search.first()
    assert first is not None
    bad = max(
        plans(formulation, first), key=lambda choice: search.resources.longest(search.resources.least_used(choice))
    )
    monkeypatch.setattr(shortest_step, "MUCH_WORK", 0)
    monkeypatch.setattr(shortest_step, "solve_top_k", lambda problem, budget: Near(objective(problem, bad), bad))
    bound = search.bound([first])
    assert 0 < bound.seconds <= step_seconds(formulation, first) and len(bound.tried) > 1


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_a_part_of_all_costs_is_added_to_what_is_weighted(mesh: str) -> None:
    formulation = made(mesh, *SIZES[1])
    resources = step_resources(formulation)
    weights = in_a_row(resources)
    for seed in range(4):
        choice = random_choice(formulation.problem, seed)
        row, both = (objective(resources.likely(weights, part), choice) for part in (0.0, 0.3))
        assert both == pytest.approx(0.7 * row + 0.3 * objective(formulation.problem, choice))


def test_plans_between_what_is_occupied_most_and_all_costs_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is hoped of the estimate alone, as with many axes, of which little overlaps."""
    monkeypatch.setattr(shortest_step, "_HOPEFUL", 0.0)
    formulation = made("dp=2,tp=8", *SIZES[1])
    search = StepSearch(formulation)
    assert search.first() is not None
    others = [choice for _, choice in search.others()]

    def middle(choice: Choice) -> float:
        longest = search.resources.longest(search.resources.roughly_used(choice))
        return longest + objective(formulation.problem, choice)

    known = {choice: middle(choice) for _, choice in search.plans}
    assert known[others[0]] == min(known.values()) and len(others) == len(set(others)) <= 3
    assert {"least use of bottlenecks, and costs", "critical path, and costs"} <= {name for name, _ in search.plans}
