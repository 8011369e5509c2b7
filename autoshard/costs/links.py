"""The real links under a group of mesh axes: how its collectives use each level of the cluster.

Ranks are row-major over the mesh. All groups of an axis run at the same time and each device belongs to one of them, so
a device has its own share of what it shares with others: g members of a group in a node drive g network ports together.
Inside a level the graph of the links decides (autoshard.cluster.topology), again for all groups at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from autoshard.cluster.hardware import Hardware, Link, check_mesh
from autoshard.cluster.topology import exchange_share, ring_share, send_share
from autoshard.ir.mesh import Mesh

NO_SHARING = ("switch", "mesh")  # kinds of graphs in which no group is routed over the links of another


@dataclass(frozen=True)
class Crossing:
    """A level that a group crosses. `members`: the fewest of a group in one block below, which work side by side;
    `joined`: the most blocks of a group within one block above. The bandwidths are bytes/s of one device, one way,
    link efficiency included: in a ring, in an all-to-all, and sending to the next member of the group."""

    link: Link
    members: int
    joined: int
    ring_bandwidth: float
    exchange_bandwidth: float
    send_bandwidth: float

    @property
    def innermost(self) -> bool:
        """True for the links between devices, false for those between groups of them."""
        return self.link.graph.size == self.link.devices


@dataclass(frozen=True)
class AxisLink:
    """`name` is the level that limits a ring over the group of `size` devices; `crossings` are innermost first.

    `ring_bandwidth`: bytes/s that pass each member, one way. `latency_seconds`: of one step, the slowest level crossed.
    `send_bandwidth`: from each member to the next one of its group, all at once.
    """

    name: str
    size: int
    ring_bandwidth: float
    latency_seconds: float
    send_bandwidth: float
    crossings: tuple[Crossing, ...]


def axis_link(hardware: Hardware, mesh: Mesh, axis_index: int) -> AxisLink:
    """The link under one axis; see `joint_link`."""
    return joint_link(hardware, mesh, (axis_index,))


@lru_cache(maxsize=4096)
def joint_link(hardware: Hardware, mesh: Mesh, axes: tuple[int, ...]) -> AxisLink:
    """The link under the groups of several axes joined. UsageError where the mesh is larger than the cluster."""
    check_mesh(hardware, mesh)
    groups = _groups(mesh, axes)
    inner = [1, *(link.devices for link in hardware.links)]
    per_level = (_crossing(link, size, groups) for link, size in zip(hardware.links, inner, strict=False))
    crossings = tuple(crossing for crossing in per_level if crossing is not None)
    if not crossings:
        first = hardware.links[0]
        bandwidth = first.bandwidth * first.efficiency
        return AxisLink(first.name, 1, bandwidth, first.latency_seconds, bandwidth, ())
    slowest = min(crossings, key=lambda c: c.members * c.ring_bandwidth)
    return AxisLink(
        slowest.link.name,
        groups.shape[1],
        slowest.members * slowest.ring_bandwidth,
        max(c.link.latency_seconds for c in crossings),
        min(c.send_bandwidth for c in crossings),
        crossings,
    )


def _groups(mesh: Mesh, axes: tuple[int, ...]) -> np.ndarray:
    """The ranks of every group of the joined axes, one row a group, ascending."""
    size = math.prod(mesh.sizes[axis] for axis in axes)
    ranks = np.arange(mesh.size).reshape(mesh.sizes)
    last = tuple(range(-len(axes), 0))
    return np.sort(np.moveaxis(ranks, axes, last).reshape(-1, size), axis=1)


def _crossing(link: Link, inner: int, groups: np.ndarray) -> Crossing | None:
    """Crossing of the groups over `link`, which joins blocks of `inner` ranks; None where no group leaves its block."""
    nodes = link.devices // inner
    if link.graph.kind in NO_SHARING:  # groups that lie in the same way in other blocks add nothing
        groups = np.unique(groups - groups[:, :1] // link.devices * link.devices, axis=0)
    cliques: dict[int, set[tuple[int, ...]]] = defaultdict(set)  # of each outer block: the blocks that a group joins
    crossed = []
    ways, way_of = np.unique(groups // inner, axis=0, return_inverse=True)
    for number, placement in enumerate(ways):
        blocks, counts = np.unique(placement, return_counts=True)
        for outer in np.unique(blocks // nodes):
            joined = blocks[blocks // nodes == outer]
            if len(joined) > 1:
                cliques[int(outer)].add(tuple(int(block) % nodes for block in joined))
                crossed.append((number, int(counts.min())))
    if not crossed:
        return None
    together = {_concurrent(clique_set) for clique_set in cliques.values()}
    bandwidth = link.bandwidth * link.efficiency
    on_rails = link.rails and _keep_rails(groups[np.isin(way_of.reshape(-1), [number for number, _ in crossed])], inner)
    spine = 1.0 if on_rails else 1 / link.oversubscription
    pairs = _concurrent_pairs([ways[number] for number, _ in crossed], nodes)
    return Crossing(
        link,
        min(members for _, members in crossed),
        max(len(clique) for clique_set in cliques.values() for clique in clique_set),
        bandwidth * spine * min(ring_share(link.graph, some) for each in together for some in each),
        bandwidth / link.oversubscription * min(exchange_share(link.graph, some) for each in together for some in each),
        bandwidth * spine * (send_share(link.graph, pairs) if pairs else 1.0),
    )


Cliques = tuple[tuple[int, ...], ...]


def _concurrent(cliques: Iterable[tuple[int, ...]]) -> tuple[Cliques, ...]:
    """The sets of cliques that use the links of the same devices at the same time: all together where no two share a
    block; else (each member has its own links) one by one."""
    ordered = tuple(sorted(cliques))
    nodes = [node for clique in ordered for node in clique]
    return (ordered,) if len(set(nodes)) == len(nodes) else tuple((clique,) for clique in ordered)


def _concurrent_pairs(ways: list[np.ndarray], nodes: int) -> tuple[tuple[int, int], ...]:
    """(giver, taker) of every member that sends to the next of its group, within one outer block. `ways`: the block of
    each member of a group."""
    pairs = set()
    for placement in ways:
        blocks = placement.tolist()
        for giver, taker in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
            if giver != taker and giver // nodes == taker // nodes:
                pairs.add((giver // nodes, giver % nodes, taker % nodes))
    return tuple(sorted({(giver, taker) for _, giver, taker in pairs}))


def _keep_rails(groups: np.ndarray, inner: int) -> bool:
    """True if each group has members at the same positions in each of its blocks."""
    return all(_keeps_rails(group, inner) for group in np.unique(groups - groups[:, :1] // inner * inner, axis=0))


def _keeps_rails(group: np.ndarray, inner: int) -> bool:
    """True if the group has members at the same positions in each of its blocks."""
    positions = {tuple(group[group // inner == block] % inner) for block in np.unique(group // inner)}
    return len(positions) == 1


def axes_by_link(mesh: Mesh, hardware: Hardware) -> dict[str, frozenset[tuple[int, ...]]]:
    """Each link and each axis, with the groups of axes whose collectives it carries, without groups within another."""
    split_axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    every = [axes for n in range(1, len(split_axes) + 1) for axes in combinations(split_axes, n)]
    sets: dict[str, frozenset[tuple[int, ...]]] = {}
    for axes in every:
        link = f"link {joint_link(hardware, mesh, axes).name}"
        sets[link] = sets.get(link, frozenset()) | {axes}
    for axis in split_axes:
        sets[f"axis {mesh.names[axis]}"] = frozenset(axes for axes in every if axis in axes)
    distinct = {held: name for name, held in reversed(sets.items())}
    return {name: held for held, name in reversed(distinct.items()) if not any(held < other for other in distinct)}
