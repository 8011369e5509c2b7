"""The mesh over the cluster: devices in their nodes with their coordinates, and for each axis the link that it uses."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cluster.hardware import Hardware
from autoshard.costs.links import axis_link
from autoshard.errors import NAMED
from autoshard.html_report.picture import svg
from autoshard.html_report.picture.shard_glyph import MOST_PARTS
from autoshard.ir.mesh import Mesh
from autoshard.units import format_bandwidth, format_seconds

CELL, GAP = svg.SIZES.cell, svg.SIZES.line / 2


@dataclass(frozen=True)
class Drawn:
    """Shapes with the room that they take."""

    body: tuple[str, ...]
    width: float
    height: float


def cluster(mesh: Mesh, hardware: Hardware) -> Drawn:
    """Nodes with the devices that the mesh uses; groups of the first device are framed in their axis' colour."""
    per_node = min(hardware.devices_per_node, mesh.size)
    nodes = -(-mesh.size // per_node)
    columns = min(MOST_PARTS // 2, per_node)
    rows = -(-min(per_node, MOST_PARTS) // columns)
    width, height = columns * (CELL + GAP) + GAP, rows * (CELL / 2 + GAP) + GAP + 18
    body: list[str] = []
    shown = min(nodes, NAMED)
    for node in range(shown):
        x = node * (width + 12)
        body.append(svg.rect(x, 0, width, height, rx=6, class_="panel"))
        body.append(svg.text(x + GAP, 14, _node_name(node, nodes, per_node, hardware), class_="small soft"))
        for place in range(min(per_node, MOST_PARTS, mesh.size - node * per_node)):
            at = x + GAP + place % columns * (CELL + GAP), 18 + GAP + place // columns * (CELL / 2 + GAP)
            body += _device(*at, node * per_node + place, mesh)
    across = shown * (width + 12)
    if nodes > shown:
        body.append(svg.text(across, height / 2, f"and {nodes - shown} nodes more", class_="soft"))
        across += 110
    legend = axis_words(mesh, hardware)
    for index, (axis, words) in enumerate(legend):
        y = height + 20 + 17 * index
        body.append(svg.rect(0, y - 9, 10, 10, class_=f"ink{axis % 8}"))
        body.append(svg.text(16, y, words))
    wide = max([across, *(16 + svg.width_of(words) for _, words in legend)])
    return Drawn(tuple(body), wide, height + 20 + 17 * len(legend))


def _node_name(node: int, nodes: int, per_node: int, hardware: Hardware) -> str:
    if nodes == 1 and per_node < hardware.devices_per_node:
        return f"{per_node} of a node's {hardware.devices_per_node}"
    return f"node {node}" + (f": {MOST_PARTS} of {per_node} drawn" if per_node > MOST_PARTS else "")


def _device(x: float, y: float, rank: int, mesh: Mesh) -> list[str]:
    """A device with its coordinates; underlined in the colour of each axis that joins it with device 0 alone."""
    coordinates = mesh.coordinates(rank)
    body = [svg.rect(x, y, CELL, CELL / 2, rx=3, class_="part" if rank == 0 else "cell")]
    label = ",".join(map(str, coordinates))
    body.append(svg.text(x + CELL / 2, y + 13, svg.clipped(label, CELL, 10), class_="small mid"))
    moved = [axis for axis, at in enumerate(coordinates) if at]
    mates = [axis for axis in range(len(coordinates)) if mesh.sizes[axis] > 1 and moved in ([], [axis])]
    for index, axis in enumerate(mates):
        at = x + CELL * index / len(mates)
        body.append(svg.rect(at, y + CELL / 2 - 3, CELL / len(mates), 3, class_=f"ink{axis % 8}"))
    return body


def axis_words(mesh: Mesh, hardware: Hardware) -> list[tuple[int, str]]:
    """For each axis longer than one: `tp: 4 devices over NVLink, 270 GB/s a device, 2 us`."""
    lines = []
    for axis, (name, size) in enumerate(mesh.axes):
        if size > 1:
            link = axis_link(hardware, mesh, axis)
            speed = f"{format_bandwidth(link.ring_bandwidth, 3)} a device in a ring"
            words = f"{name}: groups of {size} over {link.name}, {speed}, {format_seconds(link.latency_seconds, 3)}"
            lines.append((axis, f"{words} a message"))
    return lines
