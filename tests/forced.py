"""Random valid plans in which some operators must take a strategy of some kind, run against the original model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from autoshard.capture.capture import capture
from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.formulate import formulate
from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.rules import Strategy
from autoshard.search.build_plan import Origin, plan_of
from autoshard.solvers.common.result import Solution
from autoshard.solvers.heuristics import random_plans
from autoshard.verify.case import check_files, make_case

Allowed = Callable[[Op, Strategy], bool]


def forced_plan(graph: Graph, mesh: Mesh, allowed: Allowed, seed: int = 0) -> Plan:
    """A seeded random valid plan of the strategies that `allowed` accepts."""
    formulation = formulate(graph, mesh, load_hardware("a100-80g-sxm"), float("inf"), allowed)
    choice = random_plans.random_choice(formulation.problem, seed)
    solution = Solution(formulation.problem, tuple(choice), 0.0, "random")
    return plan_of(formulation, solution, Origin(graph.source), float("inf"), "random")


def variants(program: Program) -> set[str]:
    return {getattr(instruction, "variant", "") for instruction in program.instructions} - {""}


def check(
    spec: str,
    mesh: str,
    allowed: Allowed,
    seeds: tuple[int, ...] = (0,),
    arguments: dict[str, Any] | None = None,
    backend: Literal["gloo", "lockstep"] = "lockstep",
) -> tuple[set[str], float]:
    """Runs a forced plan for each seed against the original; gives the variants that ran and the largest error."""
    graph = capture(spec, arguments or {})
    case = make_case(spec, arguments or {}, graph)
    found: set[str] = set()
    largest = 0.0
    for seed in seeds:
        plan = forced_plan(graph, Mesh.parse(mesh), allowed, seed)
        program = lower(plan, graph)
        proof = check_files(case, program, emit(program, plan, graph), backend)
        assert proof.passed, f"{mesh} seed {seed}: {proof.failure}"
        found |= variants(program)
        largest = max([largest, *(kind.worst.error for kind in proof.kinds if kind.worst is not None)])
    return found, largest
