"""Random valid plans in which some operators must take a strategy of some kind, run against the original model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.apply_pins import pinned
from autoshard.constraints.pins import read_pins
from autoshard.emit import emit
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import CAST, Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.rules import Strategy
from autoshard.search.build_plan import Origin, plan_of
from autoshard.solvers import solve
from autoshard.solvers.common.result import Solution
from autoshard.solvers.common.solver_options import Options
from autoshard.solvers.heuristics import random_plans
from autoshard.verification.case import check_files, make_case

Allowed = Callable[[Op, Strategy], bool]


def forced_plan(graph: Graph, mesh: Mesh, allowed: Allowed, seed: int = 0, hardware: str = "a100-80g-sxm") -> Plan:
    """A seeded random valid plan of the strategies that `allowed` accepts."""
    formulation = formulate(PlanningContext(graph, mesh, load_hardware(hardware)), allowed)
    choice = random_plans.random_choice(formulation.problem, seed)
    solution = Solution(formulation.problem, tuple(choice), 0.0, "random")
    return plan_of(formulation, solution, Origin(graph.source), float("inf"), "random")


def pinned_plan(graph: Graph, mesh: Mesh, pins: Sequence[str], allowed: Allowed) -> Plan:
    """The least plan of the strategies that `allowed` accepts, with `pins` (WHAT=HOW)."""
    formulation = formulate(PlanningContext(graph, mesh, load_hardware("a100-80g-sxm")), allowed)
    held = pinned(formulation, read_pins(pins, None, mesh)).formulation
    solution = solve(held.problem, "dp", Options())
    return plan_of(held, solution, Origin(graph.source), float("inf"), "search")


def data_parallel(graph: Graph) -> Allowed:
    """Weights are used whole, and what depends on them is cut, or a sum."""
    weights = {p.tensor for p in graph.parameters}
    for cast in (op for op in graph.ops if op.target == CAST):
        weights |= {*cast.results} if cast.operands[0] in weights else set()

    def allowed(op: Op, strategy: Strategy) -> bool:
        if not weights.isdisjoint(op.results):
            return True
        uses = zip(op.operands, strategy.operands, strict=True)
        results = zip(op.results, strategy.results, strict=True)
        whole = all(set(str(x).split()) <= {"R", "R+"} for name, x in uses if name in weights and x is not None)
        return whole and all(
            not set(str(x).split()) & {"R", "R+"} for name, x in results if graph.tensor(name).requires_grad
        )

    return allowed


def sharded_plan(graph: Graph, mesh: Mesh, axis: str) -> Plan:
    """Data parallel over all axes, with every parameter stored in shards over one of them: FSDP, or HSDP."""
    how = ",".join(f"{'Shard(0)' if name == axis else 'Replicate'}@{name}" for name in mesh.names)
    pins = [f"parameter:{p.path}={how}" for p in graph.parameters]
    first = [f"input:{name}=Shard(0)@{','.join(mesh.names[:1])}" for name in graph.inputs]
    return pinned_plan(graph, mesh, [*pins, *first], data_parallel(graph))


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
    executed: set[str] = set()
    largest = 0.0
    for seed in seeds:
        plan = forced_plan(graph, Mesh.parse(mesh), allowed, seed)
        program = lower(plan, graph)
        proof = check_files(case, program, emit(program, plan, graph), backend)
        assert proof.passed, f"{mesh} seed {seed}: {proof.failure}"
        executed |= variants(program)
        largest = max([largest, *(kind.worst.error for kind in proof.kinds if kind.worst is not None)])
    return executed, largest
