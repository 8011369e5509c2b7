"""The network between nodes: its bandwidth and latency, fitted to collectives that were measured across nodes.

The formulas and constants are those that price a step; two figures of one level of links are free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.calibrate.cost_model_file import Entry, figure_text
from autoshard.calibrate.fitted_models import Free, Rows
from autoshard.calibrate.least_squares import fit, held_out_error
from autoshard.cluster.hardware import Hardware
from autoshard.costs.collective import link_terms
from autoshard.costs.formulas import transfer
from autoshard.costs.links import AxisLink, Crossing, joint_link
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.units import EXACT

Table = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class NetworkFit:
    """The link between nodes as measured. `bandwidth`: bytes/s of a device, one way, all losses included. `error`: mean
    absolute error on held-out rows; `whole_error`: on collectives over all devices, to which nothing was fitted."""

    link: str
    bandwidth: float
    latency_seconds: float
    rows: int
    error: float
    whole_error: float


def level_between_nodes(hardware: Hardware) -> int:
    """The level of links that joins nodes. UsageError where the profile has none."""
    below = [1, *(link.devices for link in hardware.links)]
    if hardware.devices_per_node not in below[:-1]:
        raise UsageError(
            f"{hardware.name} describes no links between nodes of {hardware.devices_per_node}",
            "a copy of the profile with a second [[links]] table: autoshard profiles NAME > mine.toml",
        )
    return below.index(hardware.devices_per_node)


@dataclass(frozen=True)
class Network:
    """A model of two constants. Rows: place (in `places`: a collective and the links under its group), bytes."""

    hardware: Hardware
    level: int
    places: tuple[tuple[str, AxisLink], ...]
    group: str = "network"

    @property
    def free(self) -> tuple[Free, ...]:
        link = self.hardware.links[self.level]
        latency = max(link.latency_seconds, EXACT)
        return (Free("latency", latency, 2.0), Free("bandwidth", link.bandwidth * link.efficiency, 2.0))

    def seconds(self, constants: Mapping[str, float], rows: Rows) -> np.ndarray:
        result = np.zeros_like(rows["bytes"])
        for index, (kind, link) in enumerate(self.places):
            chosen = rows["place"] == index
            if chosen.any():
                terms = link_terms(self.hardware, self._as_measured(link, constants), kind)
                result[chosen] = transfer(rows["bytes"][chosen], link.size, *terms)
        return result

    def _as_measured(self, link: AxisLink, constants: Mapping[str, float]) -> AxisLink:
        level_link = self.hardware.links[self.level]
        share = constants["bandwidth"] / (level_link.bandwidth * level_link.efficiency)

        def changed(crossing: Crossing) -> Crossing:
            if crossing.link != level_link:
                return crossing
            return replace(
                crossing,
                link=replace(level_link, latency_seconds=constants["latency"]),
                ring_bandwidth=crossing.ring_bandwidth * share,
                exchange_bandwidth=crossing.exchange_bandwidth * share,
                send_bandwidth=crossing.send_bandwidth * share,
            )

        return replace(link, crossings=tuple(map(changed, link.crossings)))


def network_fit(measured: Mapping[str, Any], hardware: Hardware) -> NetworkFit:
    """`measured["between"]`: groups of one device a node, all at once; `measured["whole"]`: all devices together. Rows:
    kind, nodes, bytes (of a group's whole message), seconds."""
    level = level_between_nodes(hardware)
    model, rows = _model(measured["between"], hardware, level, (0,))
    constants = fit(model, rows).constants
    whole, whole_rows = _model(measured["whole"], hardware, level, (0, 1))
    whole_errors = whole.seconds(constants, whole_rows) / whole_rows["seconds"] - 1
    return NetworkFit(
        hardware.links[level].name,
        constants["bandwidth"],
        constants["latency"],
        len(rows["seconds"]),
        held_out_error(model, rows),
        float(np.abs(whole_errors).mean()),
    )


def _model(table: Table, hardware: Hardware, level: int, axes: tuple[int, ...]) -> tuple[Network, Rows]:
    """The links under the groups of `axes` of the mesh (nodes, devices of a node)."""
    kinds = sorted({(row["kind"], int(row["nodes"])) for row in table})
    meshes = {nodes: _mesh(nodes, hardware.devices_per_node) for _, nodes in kinds}
    places = tuple((kind, joint_link(hardware, meshes[nodes], axes)) for kind, nodes in kinds)
    rows = {
        "place": np.array([kinds.index((row["kind"], int(row["nodes"]))) for row in table], dtype=float),
        "bytes": np.array([row["bytes"] for row in table], dtype=float),
        "seconds": np.array([row["seconds"] for row in table], dtype=float),
    }
    return Network(hardware, level, places), rows


def _mesh(nodes: int, devices: int) -> Mesh:
    return Mesh((("node", nodes), ("device", devices)))


def with_network(profile: str, fitted: NetworkFit, hardware: Hardware, source: str) -> str:
    """Text of a profile that states what was measured of its links between nodes, next to what it stated before."""
    level = level_between_nodes(hardware)
    before, *tables = re.split(r"^(?=\[\[links\]\])", profile, flags=re.M)
    message = f"{source}: {fitted.rows} collectives across nodes, held-out error {fitted.error:.1%}"
    figures = {
        "measured_bandwidth": f"{fitted.bandwidth / 1e9:.4g} GB/s",
        "measured_latency": f"{fitted.latency_seconds * 1e6:.4g} us",
    }
    lines = [f"{key} = {figure_text(Entry(key, value, 'measured', message))}" for key, value in figures.items()]
    text = re.sub(r"^measured_(bandwidth|latency) = .*\n", "", tables[level], flags=re.M)
    last = re.search(r"^efficiency = .*$", text, flags=re.M)
    assert last  # the profile was read
    text = "\n".join((text[: last.end()], *lines)) + text[last.end() :]
    return before + "".join([*tables[:level], text, *tables[level + 1 :]])
