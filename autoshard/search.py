"""What stands around one solve: pins and styles, the memory limit.

`search` gives the best plan, `megatron_plan` the best one of a fixed style.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard import solvers
from autoshard.errors import InfeasibleError
from autoshard.formulate import Allowed, Formulation, formulate
from autoshard.graph.model import Graph
from autoshard.hardware import Hardware, check_mesh, check_precision
from autoshard.mesh import Mesh
from autoshard.plan import Plan
from autoshard.plan_of import Origin, plan_of, priced
from autoshard.problem import Solution
from autoshard.styles import megatron
from autoshard.units import format_bytes

MEMORY_ROUNDS = 4  # how often the solver's limit is tightened when the simulated program needs more than it said


def search(
    graph: Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    solver: str = "dp",
    memory_limit_bytes: float | None = None,
    origin: Origin | None = None,
    allowed: Allowed | None = None,
    decided_by: str = "search",
) -> Plan:
    """The fastest plan that fits. Raises InfeasibleError only where a lower bound on memory is above the limit."""
    check_mesh(hardware, mesh)
    check_precision(hardware, graph.precision)
    limit = memory_limit_bytes or hardware.usable_memory_bytes
    formulation = formulate(graph, mesh, hardware, limit, allowed)
    target = limit
    for _ in range(MEMORY_ROUNDS):
        solution = _solve(formulation, solver, target, limit)
        plan = priced(
            plan_of(formulation, solution, origin or Origin(graph.source), limit, decided_by), graph, hardware
        )
        if plan.predicted_peak_bytes <= limit:
            return plan
        target = min(target, solution.peak_bytes) * limit / plan.predicted_peak_bytes * 0.999
    return plan


def _solve(formulation: Formulation, solver: str, target: float, limit: float) -> Solution:
    try:
        return solvers.solve(replace(formulation.problem, capacity_bytes=target), solver)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{error.message}; the limit is {format_bytes(limit)} a device; the largest tensors, unsplit: "
            + ", ".join(_largest(formulation.graph)),
            "more devices, --precision bf16-mixed, --optimizer sgd, or a smaller batch",
        ) from error


def _largest(graph: Graph, count: int = 5) -> list[str]:
    names = {p.tensor: p.path for p in graph.parameters}
    largest = sorted(graph.tensors, key=lambda tensor: (-tensor.bytes, tensor.name))[:count]
    return [f"{names.get(t.name, t.name)} {list(t.shape)} {format_bytes(t.bytes)}" for t in largest]


def megatron_plan(graph: Graph, mesh: Mesh, hardware: Hardware, *, origin: Origin | None = None) -> Plan:
    """The best plan in Megatron's style: the last axis splits heads, hidden and vocabulary, the others the batch.

    Shoeybi et al. 2019, arXiv:1909.08053: column-parallel then row-parallel linears, heads split, vocabulary split.
    """
    return search(graph, mesh, hardware, origin=origin, allowed=megatron, decided_by="megatron")
