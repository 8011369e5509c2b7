"""Plans that are not searched for: seeded random valid plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.formulation.cost_breakdown import parts
from autoshard.formulation.formulate import Allowed, Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.plan import Plan
from autoshard.search.build_plan import Origin, plan_of, priced, with_parts
from autoshard.solvers.common.result import Solution
from autoshard.solvers.heuristics import random_plans


def random_plan(
    context: PlanningContext, seed: int, *, origin: Origin | None = None, allowed: Allowed | None = None
) -> Plan:
    """Seeded random valid plan: any strategy (that `allowed` keeps) of any op, every redistribution possible. Memory is
    not limited."""
    formulation = formulate(context, allowed)
    choice = random_plans.random_choice(formulation.problem, seed)
    return plan_of_choice(formulation, choice, origin, f"random:{seed}")


def plan_of_choice(formulation: Formulation, choice: Sequence[int], origin: Origin | None, decided_by: str) -> Plan:
    """Plan of a choice that was not searched for, whatever its memory."""
    solution = Solution(formulation.problem, tuple(choice), 0.0, decided_by)
    graph = formulation.graph
    plan = plan_of(formulation, solution, origin or Origin(graph.source), float("inf"), decided_by)
    site_parts = parts(formulation, choice)
    plan = with_parts(priced(plan, graph, formulation.hardware), formulation, site_parts)
    sinks = [part for part, site in zip(site_parts, formulation.sites, strict=True) if site.kind == "sink"]
    outputs = sum(part.compute_seconds + part.communication_seconds for part in sinks)
    return replace(
        plan,
        certificate=replace(plan.certificate, level_objective=plan.predicted_seconds),
        search=replace(plan.search, outputs_seconds=outputs),
    )
