"""The links of one level as a graph, and what share of a device's links a group can use.

A level joins `size` nodes (devices, or the blocks of the level below). `bandwidth` in a profile is that of all links of
a node together; every link has the same speed, so the best connected node has `degree` links of bandwidth / degree.

A ring collective runs over rings that share no link, each in both directions; where a group has no ring, over chains,
on which an all-reduce passes twice (NCCL's tuning counts half of a chain's links, tuning.cc: ratio 0.5). On the hybrid
cube mesh of the DGX-1V this gives 1, 2, 4, 1.6, 2, 4, 6 links for 2 to 8 devices; measured: 1.0, 2.0, 3.8, 1.65, 2.0,
3.9, 6.0 (vTrain's all-reduce table, large sizes).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx

Edge = tuple[int, int, int]  # two nodes, number of links between them
SEARCH_STEPS = 20_000
KINDS = ("switch", "mesh", "ring", "cube-mesh", "edges")

# DGX-1 with V100 (six NVLinks a device), as `nvidia-smi topo -m` prints it.
CUBE_MESH: tuple[Edge, ...] = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
    (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """`kind` is of KINDS; `edges` are set for every kind but a switch."""

    kind: str
    size: int
    edges: tuple[Edge, ...] = ()

    @property
    def degree(self) -> int:
        """Links of the best connected node."""
        counts: Counter[int] = Counter()
        for a, b, links in self.edges:
            counts.update({a: links, b: links})
        return max(counts.values(), default=1)


def make_topology(kind: str, size: int, edges: tuple[Edge, ...] = ()) -> Topology:
    """The graph of a named kind; `edges` only for the kind `edges`. ValueError says why it can't be."""
    if kind == "switch":
        return Topology(kind, size)
    if kind == "mesh":
        all_edges = tuple((a, b, 1) for a, b in itertools.combinations(range(size), 2))
    elif kind == "ring":
        all_edges = ((0, 1, 1),) if size == 2 else tuple((a, (a + 1) % size, 1) for a in range(size))
    elif kind == "cube-mesh":
        if size != 8:
            raise ValueError(f"a cube-mesh joins 8 nodes, here there are {size}")
        all_edges = CUBE_MESH
    else:
        all_edges = edges
    if size < 2:
        raise ValueError(f"a {kind} of {size} node has no links")
    check_edges(all_edges, size)
    return Topology(kind, size, tuple((min(a, b), max(a, b), links) for a, b, links in all_edges))


def check_edges(edges: Sequence[Edge], size: int) -> None:
    """ValueError where the graph of the links is impossible: the first fault."""
    seen = set()
    for edge in edges:
        if len(edge) != 3 or not all(isinstance(x, int) and not isinstance(x, bool) for x in edge):
            raise ValueError(f"{list(edge)}: expected [node, node, number of links]")
        a, b, links = edge
        if not (0 <= a < size and 0 <= b < size):
            raise ValueError(f"{list(edge)}: the nodes of this level are 0 to {size - 1}")
        if a == b:
            raise ValueError(f"{list(edge)}: a link from node {a} to itself")
        if links < 1:
            raise ValueError(f"{list(edge)}: expected at least 1 link")
        if frozenset((a, b)) in seen:
            raise ValueError(f"{list(edge)}: nodes {a} and {b} are joined twice; give the number of links instead")
        seen.add(frozenset((a, b)))
    reached = _distances(_graph(tuple(edges), size), 0)
    if len(reached) < size:
        lost = min(set(range(size)) - set(reached))
        raise ValueError(f"node {lost} can't be reached from node 0: the links do not join all {size} nodes")


@lru_cache(maxsize=256)
def _graph(edges: tuple[Edge, ...], size: int) -> networkx.Graph[int]:
    """The nodes with their links, `links` of each pair as the edge's attribute."""
    import networkx  # only clusters with links of their own need it: `--help` and switches don't

    graph: networkx.Graph[int] = networkx.Graph()
    graph.add_nodes_from(range(size))
    graph.add_weighted_edges_from(edges, weight="links")
    return graph


@lru_cache(maxsize=4096)
def ring_share(topology: Topology, groups: tuple[tuple[int, ...], ...]) -> float:
    """The share of a node's bandwidth that passes each member of a ring collective, least over `groups`, which run at
    the same time. `groups`: the nodes of each, at least two, ascending; no node in two of them."""
    if topology.kind == "switch":
        return 1.0
    if topology.kind == "mesh":
        return min((len(group) - 1) / (topology.size - 1) for group in groups)
    return min(ring_links(topology, group) or _routed_ring(topology, groups) for group in groups) / topology.degree


@lru_cache(maxsize=4096)
def exchange_share(topology: Topology, groups: tuple[tuple[int, ...], ...]) -> float:
    """The share of a node's bandwidth that an all-to-all reaches: every pair of a group over its shortest ways at once.

    The (n-1)/n of its input that a node sends takes (n-1)/n * bytes / (bandwidth * share)."""
    if topology.kind == "switch":
        return 1.0
    largest = max(len(group) for group in groups)
    load = _load(topology, tuple((a, b) for group in groups for a, b in itertools.permutations(group, 2)))
    return (largest - 1) / load / topology.degree


@lru_cache(maxsize=4096)
def send_share(topology: Topology, pairs: tuple[tuple[int, int], ...]) -> float:
    """The share of a node's bandwidth that each pair has when all `pairs` (giver, taker) send at once."""
    return 1.0 if topology.kind == "switch" else 1 / _load(topology, pairs) / topology.degree


@lru_cache(maxsize=4096)
def ring_links(topology: Topology, group: tuple[int, ...]) -> float:
    """Links in one direction that carry a ring collective of `group` over its own links: twice the number of rings
    without a common link, or where there is none, 2(n-1)/n * half the chains. 0 where its own links do not join it."""
    links = _links_within(topology, group)
    size = len(group)
    if size == 2:
        return float(links.get((0, 1), 0))
    rings = _pack(links, size, closed=True)
    if rings:
        return 2.0 * rings
    return 2 * (size - 1) / size * 0.5 * _pack(links, size, closed=False)


def _links_within(topology: Topology, group: tuple[int, ...]) -> dict[tuple[int, int], int]:
    place = {node: index for index, node in enumerate(group)}
    within = _graph(topology.edges, topology.size).subgraph(group).edges(data="links")
    return {(min(place[a], place[b]), max(place[a], place[b])): links for a, b, links in within}


def _pack(links: dict[tuple[int, int], int], size: int, closed: bool) -> int:
    """The most rings (`closed`) or chains over all nodes of which no two use the same link."""
    degree = [sum(n for pair, n in links.items() if node in pair) for node in range(size)]
    bound = min(d // 2 for d in degree) if closed else min(*degree, sum(links.values()) // (size - 1))
    steps = [SEARCH_STEPS]
    ways = list(dict.fromkeys(_ways(links, size, closed, steps)))
    if steps[0] < 0:  # there are more: one after the other
        return _pack_greedily(dict(links), size, closed, [SEARCH_STEPS])
    return _best_packing(dict(links), ways, 0, bound, steps)


Way = tuple[tuple[int, int], ...]  # the links of a ring or chain, ascending


def _ways(links: dict[tuple[int, int], int], size: int, closed: bool, steps: list[int]) -> Iterator[Way]:
    """Rings or chains over all nodes, each once or twice (both directions)."""
    neighbours: dict[int, list[int]] = {node: [] for node in range(size)}
    for (a, b), count in links.items():
        if count > 0:
            neighbours[a].append(b)
            neighbours[b].append(a)

    def extend(path: list[int], left: set[int]) -> Iterator[Way]:
        steps[0] -= 1
        if steps[0] < 0:
            return
        if not left:
            pairs = list(itertools.pairwise(path))
            if not closed:
                yield tuple(sorted((min(p), max(p)) for p in pairs))
            elif path[0] in neighbours[path[-1]]:
                yield tuple(sorted((min(p), max(p)) for p in [*pairs, (path[-1], path[0])]))
            return
        for node in neighbours[path[-1]]:
            if node in left:
                yield from extend([*path, node], left - {node})

    for start in [0] if closed else range(size):
        yield from extend([start], set(range(size)) - {start})


def _best_packing(free: dict[tuple[int, int], int], ways: list[Way], first: int, bound: int, steps: list[int]) -> int:
    """Depth first over ways in order, each usable several times; stops at `bound`."""
    best = 0
    for index in range(first, len(ways)):
        if steps[0] < 0 or best >= bound:
            break
        if all(free[pair] > 0 for pair in ways[index]):
            steps[0] -= 1
            for pair in ways[index]:
                free[pair] -= 1
            best = max(best, 1 + _best_packing(free, ways, index, bound - 1, steps))
            for pair in ways[index]:
                free[pair] += 1
    return best


def _pack_greedily(free: dict[tuple[int, int], int], size: int, closed: bool, steps: list[int]) -> int:
    count = 0
    while (path := next(_ways(free, size, closed, steps), None)) is not None:
        count += 1
        for pair in path:
            free[pair] -= 1
    return count


def _routed_ring(topology: Topology, groups: tuple[tuple[int, ...], ...]) -> float:
    """Links a ring has where members reach each other through other nodes: one ring in the order of the nodes, in both
    directions, over shortest ways, all groups at once."""
    pairs = [pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)]
    return 2.0 / _load(topology, (*pairs, *((b, a) for a, b in pairs)))


@lru_cache(maxsize=4096)
def _load(topology: Topology, demands: tuple[tuple[int, int], ...]) -> float:
    """The load of the busiest link when each (giver, taker) sends one unit, split evenly over its shortest ways (and
    there over parallel links)."""
    graph = _graph(topology.edges, topology.size)
    load: Counter[tuple[int, int]] = Counter()
    for giver, taker in demands:
        distance = _distances(graph, taker)
        amount = {giver: 1.0}
        for _ in range(distance[giver]):
            after: dict[int, float] = {}
            for node, units in amount.items():
                closer = {n: edge["links"] for n, edge in graph[node].items() if distance[n] == distance[node] - 1}
                total = sum(closer.values())
                for other, links in closer.items():
                    load[node, other] += units / total
                    after[other] = after.get(other, 0.0) + units * links / total
            amount = after
    return max(load.values())


def _distances(graph: networkx.Graph[int], start: int) -> dict[int, int]:
    """Links on a shortest way from `start`, by node that it reaches."""
    import networkx

    return dict(networkx.single_source_shortest_path_length(graph, start))
