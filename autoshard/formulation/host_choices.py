"""The choices of look-ups whose tables may lie in host memory."""

from __future__ import annotations

from autoshard import rules
from autoshard.costs.device_bytes import host_bytes
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Op
from autoshard.ir.layout import Layout
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.host_tables import TABLE


class HostChoices:
    """Additional choices of look-ups in the tables `on_host` of a context: on the host."""

    def __init__(self, context: PlanningContext) -> None:
        self.graph, self.mesh, self.hardware = context.graph, context.mesh, context.hardware
        self.tables = {p.tensor: p for p in context.graph.parameters if p.tensor in context.on_host}

    def has(self, op: Op) -> bool:
        return bool(op.operands) and op.operands[TABLE] in self.tables

    def strategies(self, op: Op, every: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Strategies whose part of the table fits the host."""
        return tuple(s for s in rules.host_strategies(self.graph, op, every) if self._fits(op, s.operands[TABLE]))

    def _fits(self, op: Op, layout: Layout | None) -> bool:
        table = self.tables[str(op.operands[TABLE])]
        assert layout is not None
        return host_bytes(self.graph, table, layout, self.mesh) <= self.hardware.host_memory_bytes
