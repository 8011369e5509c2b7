"""Tables that a search may put on the host: those that a pin asks for, and all where the device's memory is short."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.constraints.apply_pins import label, nodes_of
from autoshard.constraints.pins import ON_HOST, Pin
from autoshard.costs.device_bytes import host_bytes, parameter_bytes
from autoshard.costs.host_memory import host_of
from autoshard.errors import InfeasibleError, UsageError
from autoshard.formulation.formulate import Formulation
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout
from autoshard.ir.plan import Plan
from autoshard.rules.host_tables import TABLE, host_problem, host_tables
from autoshard.rules.operators import record
from autoshard.units import format_bytes

SHORT = 0.5  # of a device's memory: what parameters may take, cut evenly over all, before memory counts as short
_SHARD = "rows cut over more devices, a smaller table, or a profile whose host has more memory"


def offered(formulation: Formulation, pins: Sequence[Pin], limit_bytes: float) -> frozenset[str]:
    """The tables (tensors) that may lie on the host. UsageError where a pin wants one there that can't."""
    tables = {table for pin in pins if pin.memory == ON_HOST for table in _tables_of(formulation, pin)}
    if tables:
        host_of(formulation.hardware)
    short = formulation.hardware.host is not None and _is_short(formulation, limit_bytes)
    return frozenset(tables | (set(host_tables(formulation.graph)) if short else set()))


def _tables_of(formulation: Formulation, pin: Pin) -> list[str]:
    """The tables of what a pin names: of a module or pattern, those of its look-ups."""
    graph, tables, others = formulation.graph, [], []
    for site in (formulation.sites[node] for node in nodes_of(formulation, pin)):
        op = graph.by_op[site.name] if site.kind == "op" else None
        table = site.name if op is None else op.operands[TABLE] if record(op.target).on_host else None
        if table is None:
            others.append(site)
        else:
            tables.append(table)
    if not tables:
        names = ", ".join(label(graph, site) for site in others[:3])
        message = f"pin {pin.text!r}: {names} can't run on the host: it looks nothing up in a table"
        raise UsageError(message, _tables(graph))
    for table in tables:
        reason = host_problem(graph, table) if table in _parameters(graph) else "it is no parameter"
        if reason:
            path = _parameters(graph).get(table, table)
            raise UsageError(f"pin {pin.text!r}: {path} can't lie on the host: {reason}", _tables(graph))
    return tables


def _tables(graph: Graph) -> str:
    paths = [_parameters(graph)[table] for table in host_tables(graph)]
    return f"tables that can: {', '.join(paths)}" if paths else "this model has no table that can"


def _parameters(graph: Graph) -> dict[str, str]:
    return {p.tensor: p.path for p in graph.parameters}


def _is_short(formulation: Formulation, limit_bytes: float) -> bool:
    """True if the tables do not fit one device, or all parameters, with what trains them, hardly fit all devices."""
    graph, mesh = formulation.graph, formulation.mesh
    whole, tables = Layout.replicated(mesh), host_tables(graph)
    sizes = {p.tensor: parameter_bytes(graph, p, whole, mesh) for p in graph.parameters}
    if not tables:
        return False
    return sum(sizes[t] for t in tables) > limit_bytes or sum(sizes.values()) / mesh.size > SHORT * limit_bytes


def plan_host_bytes(plan: Plan, graph: Graph) -> float:
    """Bytes of host memory that a plan takes for one device: parameters, gradients and optimizer state. Tables of
    parameter servers do not count."""
    if plan.servers.count:
        return 0.0
    parameters = {p.tensor: p for p in graph.parameters}
    return sum(host_bytes(graph, parameters[t.name], t.layout, plan.mesh) for t in plan.parameters)


def check_host_memory(plan: Plan, graph: Graph, available_bytes: float) -> None:
    """InfeasibleError where the tables of a plan do not fit the host."""
    needed = plan_host_bytes(plan, graph)
    if needed > available_bytes:
        has = f"its host has {format_bytes(available_bytes)} for it"
        message = f"the tables on the host take {format_bytes(needed)} for one device, with what trains them: {has}"
        raise InfeasibleError(message, _SHARD, proven=False)
