"""Random valid plans in which some operators must take a strategy of some kind, run against the original model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from autoshard.emit import emit
from autoshard.formulate import formulate
from autoshard.graph.capture import capture
from autoshard.graph.model import Graph, Op
from autoshard.hardware import load_hardware
from autoshard.mesh import Mesh
from autoshard.plan import Plan
from autoshard.plan_of import Origin, plan_of
from autoshard.program.lower import lower
from autoshard.program.model import Program
from autoshard.rules import Strategy
from autoshard.solvers import sampler
from autoshard.solvers.result import Solution
from autoshard.verify.case import check_files, make_case

Allowed = Callable[[Op, Strategy], bool]


def forced_plan(graph: Graph, mesh: Mesh, allowed: Allowed, seed: int = 0) -> Plan:
    """A seeded random valid plan of the strategies that `allowed` accepts."""
    formulation = formulate(graph, mesh, load_hardware("a100-80g-sxm"), float("inf"), allowed)
    choice = sampler.random_choice(formulation.problem, seed)
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
