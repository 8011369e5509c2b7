"""Captured and planned models, which the verbs of the Python interface pass to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autoshard import workflow
from autoshard.api.called_model import LiveModel
from autoshard.cluster.hardware import Hardware
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.ir.plan_json import plan_hash
from autoshard.package.package_files import read_extras
from autoshard.replay.simulated_plan import ReportExtras, SimulatedPlan, simulate_plan
from autoshard.search.build_plan import Origin
from autoshard.search.pareto_front import Point
from autoshard.search.style_plans import StylePlan
from autoshard.system.files import write_text


@dataclass(frozen=True, eq=False)
class CapturedModel:
    """A graph, and the model that it was captured from if that was an object."""

    graph: Graph
    origin: Origin = field(default_factory=Origin)
    live: LiveModel | None = None

    @property
    def parameters(self) -> int:
        """Number of trained numbers of the model."""
        return sum(self.graph.tensor(p.tensor).numel for p in self.graph.parameters)

    @property
    def hash(self) -> str:
        return graph_json.graph_hash(self.graph)

    def save(self, path: str | Path) -> None:
        """The graph as a file, which `plan` takes in place of a model."""
        graph = probed_sizes(self.graph, self.live, self.origin.model, self.origin.arguments)
        write_text(Path(path), graph_json.dumps(graph))

    def __str__(self) -> str:
        return f"{self.graph.name}: {len(self.graph.ops)} operators, {self.parameters:,} parameters"


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A plan with all that it was made from. `str(...)` is the summary that the command line prints.

    `ignored`: sentences about settings that did not count. `folder`: of the package that it was read from. `log`: what
    took how many seconds. `compiled`: simulated as `train.py --compile` runs it.
    """

    plan: Plan
    graph: Graph
    hardware: Hardware
    live: LiveModel | None = None
    folder: Path | None = None
    ignored: tuple[str, ...] = ()
    front: tuple[Point, ...] = ()
    styles: tuple[StylePlan, ...] = ()
    log: tuple[tuple[str, float], ...] = ()
    compiled: bool = False

    @cached_property
    def simulated(self) -> SimulatedPlan:
        """The program, and its simulated step."""
        return simulate_plan(self.plan, self.graph, self.hardware, self.compiled)

    @property
    def extras(self) -> ReportExtras:
        """Additional content of its report: from the search, or from its package."""
        return ReportExtras(self.styles, self.front) if self.folder is None else read_extras(self.folder)

    @property
    def hash(self) -> str:
        return plan_hash(self.plan, self.graph)

    def __str__(self) -> str:
        from autoshard.text.plan_summary import summary

        return summary(self.plan, self.graph, timeline=self.simulated.timeline, step=self.simulated.step)

    def __repr__(self) -> str:
        return f"<plan {self.hash} of {self.graph.name} on {self.plan.mesh} of {self.plan.hardware}>"


def with_probed_sizes(plan: PlannedModel) -> Graph:
    """The plan's graph, with what its model shows of other sizes if it is at hand and was not asked before."""
    if plan.folder is not None:
        return plan.graph
    return probed_sizes(plan.graph, plan.live, plan.plan.model, plan.plan.model_arguments)


def probed_sizes(
    graph: Graph, live: LiveModel | None, spec: str, arguments: tuple[tuple[str, str | int | float | bool], ...]
) -> Graph:
    """`graph` with what its model, an object or one named by text, shows of other sizes."""
    if graph.free_sizes or graph.dynamic:
        return graph
    if live is not None:
        from autoshard.api.live_model import recaptured

        return recaptured(live, graph)
    return workflow.with_probed_sizes(graph, spec, dict(arguments))
