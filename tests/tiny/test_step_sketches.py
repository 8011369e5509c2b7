"""Plans and weights that are found over few choices of each node: they guide the search, and never make a bound."""

from __future__ import annotations

import pytest

from autoshard import solvers
from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import objective
from autoshard.search import step_search
from autoshard.search.step_search import StepSearch
from autoshard.solvers.heuristics.random_plans import random_choice
from autoshard.solvers.relax.few_ranked import Near
from tests.graphs import mlp_graph
from tests.tiny.test_step_bound import Counted, plans, step_seconds


def deep(mesh: str) -> Formulation:
    graph = mlp_graph(layers=12, batch=64, hidden=256)
    return formulate(graph, Mesh.parse(mesh), load_hardware("h100-80g-sxm"), float("inf"))


def test_weights_are_found_over_few_choices_and_one_bound_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    formulation = deep("dp=2,tp=2")
    exact = StepSearch(formulation)
    first = exact.first()
    assert first is not None
    whole = exact.bound([first])

    monkeypatch.setattr(step_search, "_MOST_WORK", 0)
    monkeypatch.setattr(step_search, "least_of_few", few := Counted(step_search.least_of_few))
    search = StepSearch(formulation)
    assert search.sketched
    search.first()
    found = search.bound([first])
    assert few.first and found.seconds >= 0.98 * whole.seconds and len(found.tried) > len(few.first)
    least = solvers.solve(search.leading.bounding(found.weights), "dp").objective
    assert found.seconds == pytest.approx(least + float(found.weights @ search.leading.constants))
    for choice in (first, random_choice(formulation.problem, 0)):
        assert found.seconds <= step_seconds(formulation, choice)


def test_few_choices_never_make_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the choices of one bad plan the least is what that one takes: above the step of a good one."""
    formulation = deep("dp=2,tp=2")
    search = StepSearch(formulation)
    first = search.first()
    assert first is not None
    bad = max(
        plans(formulation, first), key=lambda choice: search.resources.longest(search.resources.least_used(choice))
    )
    monkeypatch.setattr(step_search, "_MOST_WORK", 0)
    monkeypatch.setattr(step_search, "least_of_few", lambda problem, budget: Near(objective(problem, bad), bad))
    found = search.bound([first])
    assert 0 < found.seconds <= step_seconds(formulation, first) and len(found.tried) > 1
