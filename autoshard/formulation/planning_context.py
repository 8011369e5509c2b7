"""Inputs of a strategy-selection problem, and of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cluster.hardware import Hardware
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan


@dataclass(frozen=True, eq=False)
class PlanningContext:
    """A graph on a mesh of devices. Without `all_to_all` no redistribution or variant uses it. `micro_batches`: of a
    step, each as large as the batch of `graph`. `on_host`: the tables (tensors) that may lie in host memory, too."""

    graph: Graph
    mesh: Mesh
    hardware: Hardware
    all_to_all: bool = True
    micro_batches: int = 1
    on_host: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[object, ...]:
        """All but the graph, for comparison."""
        return self.mesh, self.hardware, self.all_to_all, self.micro_batches, self.on_host


def context_of(plan: Plan, graph: Graph, hardware: Hardware) -> PlanningContext:
    """Context of the problem that `plan` solves, without tables in host memory."""
    return PlanningContext(graph, plan.mesh, hardware, plan.search.all_to_all, plan.step.micro_batches)
