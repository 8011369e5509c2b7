"""Plans that are not searched for: the strategies that a fixed style allows, and seeded random valid plans."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cluster.hardware import Hardware
from autoshard.formulation.formulate import Allowed, Formulation, formulate
from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.operators import record
from autoshard.search.build_plan import Origin, plan_of, priced
from autoshard.solvers.common.result import Solution
from autoshard.solvers.heuristics import random_plans


def megatron(op: Op, strategy: Strategy) -> bool:
    """Megatron's style: the last axis splits heads, hidden and vocabulary, the others the batch."""
    style = record(op.target).tensor_parallel
    if style is None:
        return True
    *data, tensor = strategy.choices
    if any(choice.factor in (*style.split, *style.whole) for choice in data):
        return False
    return tensor.factor in style.split or (style.optional and tensor.kind == "repeat")


STYLES: dict[str, Allowed] = {"megatron": megatron}  # name -> the strategies that it leaves


def random_plan(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    seed: int,
    *,
    origin: Origin | None = None,
    allowed: Allowed | None = None,
    all_to_all: bool = True,
) -> Plan:
    """A seeded random valid plan: any strategy (that `allowed` keeps) of any op, every redistribution possible. Memory
    is not limited."""
    formulation = formulate(graph, mesh, hardware, float("inf"), allowed, all_to_all)
    choice = random_plans.random_choice(formulation.problem, seed)
    return plan_of_choice(formulation, choice, origin, f"random:{seed}")


def plan_of_choice(formulation: Formulation, choice: Sequence[int], origin: Origin | None, decided_by: str) -> Plan:
    """The plan of a choice that nothing was searched for, whatever its memory."""
    solution = Solution(formulation.problem, tuple(choice), 0.0, decided_by)
    graph = formulation.graph
    plan = plan_of(formulation, solution, origin or Origin(graph.source), float("inf"), decided_by)
    return priced(plan, graph, formulation.hardware)
