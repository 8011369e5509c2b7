"""A plan carried to its program and simulated step, and what a package and its report hold in addition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.cluster.hardware import Hardware
    from autoshard.ir.graph import Graph
    from autoshard.ir.plan import Plan
    from autoshard.ir.program import Program
    from autoshard.search.pareto_front import Point
    from autoshard.search.style_plans import StylePlan
    from autoshard.simulation import Timeline
    from autoshard.simulation.steps.program_step import AccountedStep


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan carried to its program and simulated step."""

    plan: Plan
    graph: Graph
    hardware: Hardware
    program: Program
    timeline: Timeline

    @cached_property
    def step(self) -> AccountedStep:
        """Whole step, and where its time goes."""
        from autoshard.simulation.steps.program_step import accounted_step

        return accounted_step(self.plan, self.program, self.graph, self.hardware, self.timeline)


@dataclass(frozen=True)
class ReportExtras:
    """Contents of a package next to its plan: how known styles compare, the front if asked for, what `verify` found,
    the emitted model_parallel.py, and plans for other numbers of devices, the most first."""

    styles: tuple[StylePlan, ...] = ()
    front: tuple[Point, ...] = ()
    verification: Mapping[str, Any] | None = None
    model_text: str = ""
    others: tuple[Plan, ...] = ()


def simulate_plan(plan: Plan, graph: Graph, hardware: Hardware, compiled: bool = False) -> SimulatedPlan:
    """Lowers the plan and simulates its program, with its blocks `compiled` or not."""
    from autoshard.program.lower import lower
    from autoshard.search.build_plan import simulated
    from autoshard.simulation import simulate

    if plan.servers.count:
        from autoshard.simulation.steps.server_step import worker_program

        _, program, small = worker_program(plan, graph)
        timeline = simulate(program, small, hardware, compiled)
        return SimulatedPlan(plan, graph, hardware, lower(plan, graph), timeline)
    if not compiled:
        outcome = simulated(plan, graph, hardware)
        return SimulatedPlan(plan, graph, hardware, outcome.program, outcome.timeline)
    program = lower(plan, graph)
    return SimulatedPlan(plan, graph, hardware, program, simulate(program, graph, hardware, compiled))
