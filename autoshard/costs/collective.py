"""Seconds of one collective over mesh axes: two protocols, one phase for each level of links that the group crosses.

    t = launch + step * latency * steps                                    (the latency-bound protocol)
        + (setup + setup_step * latency * steps) * (1 - exp(-S / (n * switch)))   (what the other one costs to start)
        + S * share / (bandwidth * efficiency * (1 - 1/n)^ramp)

(implemented in `formulas.transfer`, its terms in `collective.link_terms`, steps in `collective._steps`, share in
`collective._seconds_per_byte`, ramp in `formulas.ramp`) for S bytes over n members; a ring all-reduce has 2(n-1) steps
and moves 2(n-1)/n of S, an all-gather or reduce-scatter half of that, the latter at `scatter` of the rate, where a
backend sums more slowly than it moves (gloo). Across nodes the g members inside a node first
work on S, then each on S/g over its own port: phases overlap in part: the slowest counts whole and of the others the
share `unhidden` (one half: the all-reduce measured on 4 x 8 B200 lies between the sum of phases, 6 to 19 % above, and
the slowest alone, 26 to 37 % below). All-reduces across nodes run over trees for small messages. `bandwidth` comes from
the graph of the links, see autoshard.cluster.topology; groups that run at the same time share it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, overload

from autoshard.cluster.hardware import Hardware
from autoshard.costs.formulas import ramp, transfer
from autoshard.costs.links import AxisLink, Crossing, joint_link
from autoshard.ir.mesh import Mesh
from autoshard.redistribute import CARRIED, CollectiveKind

if TYPE_CHECKING:
    import numpy as np


@overload
def collective_seconds(hardware: Hardware, mesh: Mesh, axis: int, kind: str, full_bytes: float) -> float: ...
@overload
def collective_seconds(hardware: Hardware, mesh: Mesh, axis: int, kind: str, full_bytes: np.ndarray) -> np.ndarray: ...
def collective_seconds(
    hardware: Hardware, mesh: Mesh, axis: int, kind: str, full_bytes: float | np.ndarray
) -> float | np.ndarray:
    """Seconds of a collective. `full_bytes` is the whole message of a group: the output of an all_gather, the input of
    a reduce_scatter, the tensor of an all_reduce or broadcast, the local input of an all_to_all, what each member of a
    send_receive gives to the next. 0 for an axis of size 1 or an empty message. An array of sizes gives an array.
    """
    return joint_seconds(hardware, mesh, (axis,), kind, full_bytes)


@overload
def joint_seconds(hardware: Hardware, mesh: Mesh, axes: tuple[int, ...], kind: str, full_bytes: float) -> float: ...
@overload
def joint_seconds(
    hardware: Hardware, mesh: Mesh, axes: tuple[int, ...], kind: str, full_bytes: np.ndarray
) -> np.ndarray: ...
def joint_seconds(
    hardware: Hardware, mesh: Mesh, axes: tuple[int, ...], kind: str, full_bytes: float | np.ndarray
) -> float | np.ndarray:
    """Seconds as of `collective_seconds`, over one group of several axes joined."""
    size = math.prod(mesh.sizes[axis] for axis in axes)
    if size == 1:
        return full_bytes * 0.0
    terms = _terms(hardware, mesh, axes, kind)
    if isinstance(full_bytes, int | float):
        return transfer(float(full_bytes), size, *terms) if full_bytes else 0.0
    return transfer(full_bytes, size, *terms) * (full_bytes > 0)


def per_byte_seconds(hardware: Hardware, mesh: Mesh, axes: tuple[int, ...], kind: str) -> float:
    """Seconds that a byte of a large message adds, over several axes joined; a collective's bytes never take less."""
    return _terms(hardware, mesh, axes, kind)[3] if math.prod(mesh.sizes[axis] for axis in axes) > 1 else 0.0


Terms = tuple[float, float, float, float]  # fixed seconds, setup seconds, switch bytes, seconds per byte


@lru_cache(maxsize=4096)
def _terms(hardware: Hardware, mesh: Mesh, axes: tuple[int, ...], name: str) -> Terms:
    return link_terms(hardware, joint_link(hardware, mesh, axes), name)


def link_terms(hardware: Hardware, link: AxisLink, name: str) -> Terms:
    """Terms of `formulas.transfer` for a collective over `link`. A level's latency counts for each of its steps."""
    kind = CARRIED[name]
    key = f"collective.{kind.constants}"
    waits = [crossing.link.latency_seconds * _steps(kind, crossing) for crossing in link.crossings]
    if kind.route in ("send", "exchange"):  # all pairs at once: what crosses several levels waits for the slowest
        waits = [max(waits)]
    latency = math.fsum(waits)
    per_byte = [_seconds_per_byte(hardware, kind, link, crossing) for crossing in link.crossings]
    slowest = max(per_byte)
    overlapped = 0.0 if kind.route in ("send", "exchange") else hardware.constant("collective.unhidden")
    return (
        hardware.constant("collective.launch") + hardware.constant(f"{key}.step") * latency,
        hardware.constant(f"{key}.setup") + hardware.constant(f"{key}.setup_step") * latency,
        hardware.constant(f"{key}.switch"),
        slowest + overlapped * (math.fsum(per_byte) - slowest),
    )


def _steps(kind: CollectiveKind, crossing: Crossing) -> float:
    """Steps one after the other: around a ring; between nodes an all-reduce goes up and down a tree."""
    if kind.route == "send":
        return 1
    if kind.passes == 2 and not crossing.innermost:
        return 2 * math.ceil(math.log2(crossing.joined))
    return kind.passes * (crossing.joined - 1)


def _seconds_per_byte(hardware: Hardware, kind: CollectiveKind, link: AxisLink, crossing: Crossing) -> float:
    """Seconds per byte of the whole message, on one level. A kind's constants are for links between devices."""
    efficiency = 1.0
    if crossing.innermost:
        key = f"collective.{kind.constants}"
        efficiency = hardware.constant(f"{key}.efficiency") * ramp(crossing.joined, hardware.constant(f"{key}.ramp"))
        if kind.relative:
            efficiency *= hardware.constant(f"{key}.{kind.relative}")
        if kind.passes == 2 and crossing.joined >= crossing.link.reduces_from:
            efficiency *= hardware.constant("collective.all_reduce.in_network")
    if kind.route == "send":
        return 1 / (crossing.send_bandwidth * efficiency)
    if kind.route == "exchange":
        return (link.size - crossing.members) / link.size / (crossing.exchange_bandwidth * efficiency)
    bandwidth = crossing.members * crossing.ring_bandwidth * efficiency
    if kind.route == "chain":
        return 1 / bandwidth
    return kind.passes * (crossing.joined - 1) / crossing.joined / bandwidth
