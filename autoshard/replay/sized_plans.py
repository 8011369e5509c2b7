"""Plans of a graph with dynamic sizes, priced at each size of a histogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.cluster.hardware import Hardware
from autoshard.constraints.size_histogram import SizePoint
from autoshard.formulation.formulate import Formulation
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.replay.resize import reapply
from autoshard.search.fixed_step import predicted
from autoshard.search.search_request import SearchRequest
from autoshard.search.search_task import SearchTask, prepare
from autoshard.solvers.common.result import fits


@dataclass(frozen=True)
class SizedRequest:
    """A planning request: `graph` at its largest sizes, and `graphs` at those of `points`."""

    graph: Graph
    hardware: Hardware
    wanted: SearchRequest
    points: Sequence[SizePoint]
    graphs: Sequence[Graph]

    @property
    def weights(self) -> list[float]:
        """Weight of each point."""
        return [point.weight for point in self.points]

    def holds(self, plan: Plan) -> bool:
        """True if the plan's step at the largest sizes fits the memory."""
        limit = self.wanted.memory_limit_bytes
        return fits(plan.step_peak_bytes, self.hardware.usable_memory_bytes if limit is None else limit)

    def steps(self, plan: Plan) -> tuple[float, ...]:
        """Seconds of the step of a plan of `graph`, at each point."""
        return tuple(self.at(plan, self.graph, other).step_seconds for other in self.graphs)

    def at(self, plan: Plan, graph: Graph, other: Graph) -> Plan:
        """`plan` of `graph`, priced on the same graph at other sizes."""
        return plan if other is graph else predicted(reapply(plan, graph, other, self.hardware), other)

    def formulated(self, mesh: Mesh) -> tuple[SearchTask, list[Formulation]]:
        """Search at the largest sizes, and the problem at each point."""
        request = replace(self.wanted, mesh=mesh, devices=None)
        every = [prepare(at, mesh, self.hardware, request) for at in (self.graph, *self.graphs)]
        return every[0], [task.formulation for task in every[1:]]


@dataclass(frozen=True)
class Sized:
    """A plan of the graph at its largest sizes, with its step at each size. `name`: what it is the best for."""

    name: str
    plan: Plan
    seconds: tuple[float, ...]

    def expected(self, points: Sequence[SizePoint]) -> float:
        """Mean step over the points."""
        return sum(point.weight * seconds for point, seconds in zip(points, self.seconds, strict=True))
