"""The real link under a mesh axis: what a collective over the axis has per device, whichever levels it crosses."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoshard.hardware import Hardware, Link, check_mesh
from autoshard.mesh import Mesh


@dataclass(frozen=True)
class AxisLink:
    """`name` is the level that limits a ring over the axis.

    `ring_bandwidth`: bytes/s that pass each member, one way (efficiencies included). `exchange_seconds_per_byte`:
    of an all-to-all, per byte of a member's local input. `latency_seconds`: of one step, the slowest level crossed.
    """

    name: str
    ring_bandwidth: float
    exchange_seconds_per_byte: float
    latency_seconds: float


def axis_link(hardware: Hardware, mesh: Mesh, axis_index: int) -> AxisLink:
    """The link under one axis; see `joint_link`."""
    return joint_link(hardware, mesh, (axis_index,))


@lru_cache(maxsize=4096)
def joint_link(hardware: Hardware, mesh: Mesh, axes: tuple[int, ...]) -> AxisLink:
    """The link under the groups of several axes joined. Ranks are row-major over the mesh.

    All groups run at the same time, and each device belongs to one of them, so a group has the shares of its own
    members: g members in a node drive g network ports together (a ring over them uses all), which is
    min(link inside, g x port) per ring.
    """
    check_mesh(hardware, mesh)
    groups = _groups(mesh, axes)
    size = len(groups[0])
    crossings = [
        crossing
        for link, inner in zip(hardware.links, [1, *(link.devices for link in hardware.links)], strict=False)
        if (crossing := _crossing(link, inner, groups)) is not None
    ]
    if not crossings:
        first = hardware.links[0]
        return AxisLink(first.name, first.bandwidth * first.efficiency, 0.0, first.latency_seconds)
    slowest = min(crossings, key=lambda c: c.members * c.device_bandwidth)
    return AxisLink(
        slowest.link.name,
        slowest.members * slowest.device_bandwidth,
        max((size - c.members) / size / c.device_bandwidth for c in crossings),
        max(c.link.latency_seconds for c in crossings),
    )


@dataclass(frozen=True)
class _Crossing:
    """A level that groups cross: the fewest `members` of a group in a block below it, each with `device_bandwidth`."""

    link: Link
    members: int
    device_bandwidth: float


def _groups(mesh: Mesh, axes: tuple[int, ...]) -> list[list[int]]:
    """The ranks of every group of the joined axes."""
    size = math.prod(mesh.sizes[axis] for axis in axes)
    ranks = np.arange(mesh.size).reshape(mesh.sizes)
    last = tuple(range(-len(axes), 0))
    groups: list[list[int]] = np.moveaxis(ranks, axes, last).reshape(-1, size).tolist()
    return groups


def _crossing(link: Link, inner: int, groups: list[list[int]]) -> _Crossing | None:
    """How the groups use `link`, which joins blocks of `inner` ranks; None where no group leaves its block."""
    found = None
    for shape in {_blocks(link, inner, group) for group in groups}:
        members, joined = shape
        if joined > 1:
            share = (joined - 1) / (link.devices // inner - 1) if link.topology == "mesh" else 1.0
            crossing = _Crossing(link, members, link.bandwidth * link.efficiency * share)
            if found is None or members * crossing.device_bandwidth < found.members * found.device_bandwidth:
                found = crossing
    return found


def _blocks(link: Link, inner: int, group: list[int]) -> tuple[int, int]:
    """(fewest members in one inner block, fewest inner blocks joined within one outer block, 1 where none are)."""
    counts = Counter(rank // inner for rank in group)
    joined = Counter(block * inner // link.devices for block in counts)
    several = [number for number in joined.values() if number > 1]
    return min(counts.values()), min(several, default=1)
