"""The simulated step of a choice."""

from __future__ import annotations

from autoshard.formulation.formulate import Formulation
from autoshard.search.build_plan import Origin, plan_of, priced
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.result import Solution


def step_seconds(formulation: Formulation, choice: Choice) -> float:
    plan = plan_of(formulation, Solution(formulation.problem, choice, 0.0, "test"), Origin("test"), 1e18, "test")
    return priced(plan, formulation.graph, formulation.hardware).predicted_seconds
