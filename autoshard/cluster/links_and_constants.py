"""Tables of a profile except `[device]` (`hardware.py`): links, the host of a node, peaks, cost constants."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from autoshard import units
from autoshard.cluster import topology
from autoshard.cluster.profile_reader import Table
from autoshard.cluster.topology import Edge, Topology

NO_GRAPH = Topology("switch", 2)
DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "float4", "int8")


@dataclass(frozen=True)
class Link:
    """Joins `devices` consecutive ranks (or, above the first level, the groups of the level below).

    `bandwidth` is one device's share of all its links of this level, bytes/s one way, before `efficiency`; where the
    graph has several links a node, a group may reach fewer of them. `latency_seconds` is that of one step.
    `oversubscription` divides what crosses the spine: all traffic, or with `rails` (ports of the same position in each
    block share a switch) only traffic between different positions. Groups of `reduces_from` devices and more are
    reduced by the switch itself. Where a profile states what was measured next to the datasheet's figures, `efficiency`
    (above 1 if need be) and `latency_seconds` are as measured.
    """

    name: str
    devices: int
    topology: str
    bandwidth: float
    latency_seconds: float
    efficiency: float
    graph: Topology = NO_GRAPH
    rails: bool = False
    oversubscription: float = 1.0
    reduces_from: int = sys.maxsize


@dataclass(frozen=True)
class NodeHost:
    """The host of a node. All devices of the node share its memory, of which a plan may use the fraction
    `usable_memory`, and that memory's bandwidth; each has a link of its own to it, bytes/s one way."""

    memory_bytes: float
    usable_memory: float
    memory_bandwidth: float
    memory_efficiency: float
    link_bandwidth: float
    link_latency_seconds: float
    link_efficiency: float


class Constant(NamedTuple):
    """Format of a constant: a number, or a quantity that `parse` reads. `default` None: it must be there."""

    key: str
    parse: Callable[[str], float] | None
    default: float | None
    least: float = 0.0


def _protocol(kind: str) -> list[Constant]:
    """Constants of the bandwidth-bound protocol of a kind of collective, see costs/formulas.py."""
    return [
        Constant(f"collective.{kind}.step", None, 1.0),
        Constant(f"collective.{kind}.setup", units.parse_seconds, 0.0),
        Constant(f"collective.{kind}.setup_step", None, 0.0),
        Constant(f"collective.{kind}.switch", units.parse_bytes, 2.0**20, 1.0),
        Constant(f"collective.{kind}.efficiency", None, 1.0, 1e-6),
        Constant(f"collective.{kind}.ramp", None, 0.0),
    ]


CONSTANTS: tuple[Constant, ...] = (
    Constant("matmul.launch", units.parse_seconds, None),
    Constant("matmul.compute", None, None, 1e-6),
    Constant("matmul.memory", None, None, 1e-6),
    Constant("matmul.exponent", None, None, 1.0),
    Constant("matmul.fill", None, 0.0),
    Constant("matmul.depth", units.parse_seconds, 0.0),
    Constant("matmul.split", None, 2000.0, 1.0),
    Constant("matmul.dgrad", None, 1.0, 1e-6),
    Constant("matmul.wgrad", None, 1.0, 1e-6),
    Constant("matmul.misaligned", None, 1.0, 1e-6),
    Constant("attention.launch", units.parse_seconds, None),
    Constant("attention.compute", None, None, 1e-6),
    Constant("attention.memory", None, None, 1e-6),
    Constant("attention.exponent", None, None, 1.0),
    Constant("attention.head", None, 0.0),
    Constant("attention.chain", units.parse_seconds, 0.0),
    Constant("attention.backward", None, 1.0, 1e-6),
    Constant("memory.default", None, None, 1e-6),
    Constant("memory.elementwise", None, None, 1e-6),
    Constant("memory.activation", None, None, 1e-6),
    Constant("memory.normalisation", None, None, 1e-6),
    Constant("memory.softmax", None, 0.62, 1e-6),
    Constant("memory.gather", None, 0.5, 1e-6),
    Constant("memory.loss", None, 0.0),  # 0: see OTHERWISE
    Constant("memory.parallel_loss", None, 0.0),
    Constant("memory.optimizer", None, 0.0),
    Constant("memory.cache", None, 1.0, 1.0),
    Constant("memory.cache_size", units.parse_bytes, 2.0**25, 1.0),
    Constant("allocator.block", units.parse_bytes, 512.0, 1.0),
    Constant("host.dispatch", units.parse_seconds, 0.0),
    Constant("host.exponent", None, 6.0, 1.0),
    Constant("host.stall", units.parse_seconds, 0.0),
    Constant("overlap.slowdown", None, 0.15),
    Constant("collective.launch", units.parse_seconds, None),
    Constant("collective.unhidden", None, 0.5),
    *_protocol("ring"),
    Constant("collective.ring.scatter", None, 1.0, 1e-6),
    *_protocol("all_reduce"),
    Constant("collective.all_reduce.in_network", None, 1.0, 1e-6),
    *_protocol("exchange"),
    # Relative errors of a prediction, from the validation; where there was none, what generic constants give.
    Constant("error.matmul", None, 0.35),
    Constant("error.attention", None, 0.35),
    Constant("error.memory", None, 0.35),
    Constant("error.collective", None, 0.5),
)


# The constant that stands in for one that is 0.
OTHERWISE = {
    "memory.loss": "memory.normalisation",
    "memory.parallel_loss": "memory.default",
    "memory.optimizer": "memory.elementwise",
}


def read_constants(table: Table) -> tuple[tuple[str, float], ...]:
    """The value of every constant by its dotted key; those left out of the file have their neutral value."""
    groups = {"": table}
    values = []
    for constant in CONSTANTS:
        outer, _, key = constant.key.rpartition(".")
        values.append((constant.key, _constant(_group(groups, outer), key, constant)))
    for read in groups.values():
        read.finish()
    return tuple(values)


def _group(groups: dict[str, Table], name: str) -> Table:
    if name not in groups:
        outer, _, key = name.rpartition(".")
        optional = all(c.default is not None for c in CONSTANTS if c.key.startswith(f"{name}."))
        parent = _group(groups, outer)
        there = parent.has(key) or not optional
        groups[name] = parent.table(key) if there else Table({}, parent.faults, f"{parent.path}.{key}")
    return groups[name]


def _constant(table: Table, key: str, constant: Constant) -> float:
    if constant.default is not None and not table.has(key):
        return constant.default
    if constant.parse is not None:
        value = table.figure(key, constant.parse, zero=constant.least == 0)
    else:
        value = table.number(key)
    if value < constant.least:
        table.fault(key, f"expected at least {constant.least:g}, got {value:g}")
        return max(constant.least, 1.0)
    return value


def read_peaks(table: Table) -> tuple[tuple[str, float], ...]:
    if not table.data:
        table.fault("", "expected at least one dtype with its FLOP/s")
    peaks = [(dtype, table.figure(dtype, units.parse_flop_rate)) for dtype in DTYPES if table.has(dtype)]
    table.finish()
    return tuple(peaks)


def read_host(table: Table) -> NodeHost:
    host = NodeHost(
        memory_bytes=table.figure("memory", units.parse_bytes),
        usable_memory=table.fraction("usable_memory"),
        memory_bandwidth=table.figure("memory_bandwidth", units.parse_bandwidth),
        memory_efficiency=table.fraction("memory_efficiency"),
        link_bandwidth=table.figure("link_bandwidth", units.parse_bandwidth),
        link_latency_seconds=table.figure("link_latency", units.parse_seconds, zero=True),
        link_efficiency=table.fraction("link_efficiency"),
    )
    table.finish()
    return host


def read_links(root: Table) -> tuple[Link, ...]:
    """Links, innermost first; each level's graph is checked."""
    tables = root.tables("links")
    if not tables and root.has("links"):
        root.fault("links", "expected at least one level")
    sizes = [1, *(table.integer("devices") for table in tables)]
    for table, (inner, outer) in zip(tables, pairwise(sizes), strict=True):
        if outer <= inner or outer % inner:
            message = f"joins {outer} devices, expected a larger multiple of the level below, which joins {inner}"
            table.fault("devices", message)
    links = [_link(table, inner) for table, inner in zip(tables, sizes, strict=False)]
    return tuple(links)


def _link(table: Table, inner: int) -> Link:
    name, kind, devices = table.text("name"), table.text("topology", topology.KINDS), table.integer("devices")
    bandwidth = table.figure("bandwidth", units.parse_bandwidth)
    ports = table.integer("ports") if table.has("ports") else inner
    share, efficiency = bandwidth * ports / inner, table.fraction("efficiency")
    latency = table.figure("latency", units.parse_seconds, zero=True)
    if table.has("measured_bandwidth"):
        efficiency = table.figure("measured_bandwidth", units.parse_bandwidth) / share
    if table.has("measured_latency"):
        latency = table.figure("measured_latency", units.parse_seconds, zero=True)
    link = Link(
        name=name,
        devices=devices,
        topology=kind,
        bandwidth=share,
        latency_seconds=latency,
        efficiency=efficiency,
        graph=_graph(table, kind, max(2, devices // inner)),
        rails=_flag(table, "rails"),
        oversubscription=_oversubscription(table),
        reduces_from=max(2, round(table.number("reduces_from"))) if table.has("reduces_from") else sys.maxsize,
    )
    table.finish()
    return link


def _flag(table: Table, key: str) -> bool:
    if not table.has(key):
        return False
    if not isinstance(table.data[key], bool):
        table.fault(key, f"expected true or false, got {table.data[key]!r}")
    return table.data[key] is True


def _oversubscription(table: Table) -> float:
    if not table.has("oversubscription"):
        return 1.0
    value = table.number("oversubscription")
    if value < 1:
        table.fault("oversubscription", f"expected at least 1 (no oversubscription), got {value:g}")
    return max(1.0, value)


def _graph(table: Table, kind: str, size: int) -> Topology:
    edges: tuple[Edge, ...] = ()
    has_edges = table.has("edges")
    if has_edges and kind != "edges":
        table.fault("edges", f'are only read where topology = "edges"; here it is {kind!r}')
    if kind == "edges":
        value = table.value("edges")
        if value is None:
            return Topology("switch", size)
        if not isinstance(value, list) or not all(isinstance(edge, list) for edge in value):
            table.fault("edges", f"expected [[node, node, number of links], …], got {value!r}")
            return Topology("switch", size)
        edges = tuple(tuple(edge) for edge in value)
    try:
        return topology.make_topology(kind, size, edges)
    except ValueError as error:
        table.fault("edges" if has_edges else "topology", str(error))
        return Topology("switch", size)
