"""Graphs of links: cases by hand, and brute force on small random ones."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster.topology import (
    CUBE_MESH,
    Topology,
    check_edges,
    exchange_share,
    make_topology,
    ring_links,
    ring_share,
    send_share,
)

CUBE, MESH, RING = make_topology("cube-mesh", 8), make_topology("mesh", 4), make_topology("ring", 8)
ALL = tuple(range(8))


@pytest.mark.parametrize(("size", "links"), [(2, 1), (3, 2), (4, 4), (5, 1.6), (6, 2), (7, 4), (8, 6)])
def test_hybrid_cube_mesh(size, links):
    """The counts that large all-reduces on a DGX-1V show: 1.0, 2.0, 3.8, 1.65, 2.0, 3.9, 6.0 times one link."""
    assert ring_links(CUBE, ALL[:size]) == pytest.approx(links)
    assert ring_share(CUBE, (ALL[:size],)) == pytest.approx(links / 6)


def test_every_device_of_the_cube_mesh_has_six_links():
    degree = Counter()
    for a, b, links in CUBE_MESH:
        degree.update({a: links, b: links})
    assert set(degree.values()) == {6} and len(degree) == 8


@pytest.mark.parametrize(
    ("topology", "groups", "share"),
    [
        (make_topology("switch", 8), ((0, 1),), 1),
        (MESH, ((0, 1, 2, 3),), 1),
        (MESH, ((0, 1), (2, 3)), 1 / 3),
        (MESH, ((0, 1, 2),), 2 / 3),
        (RING, (ALL,), 1),
        (RING, ((0, 1, 2, 3), (4, 5, 6, 7)), 2 * 3 / 4 * 0.5 / 2),  # a chain of 4: 2(n-1)/n of half a link, of two
        (RING, ((0, 2, 4, 6), (1, 3, 5, 7)), 0.5),  # both rings of each over the same links
        (CUBE, ((0, 4), (1, 5), (2, 6), (3, 7)), 1 / 6),  # two links, two, one, one
        (CUBE, ((0, 7),), 2 / 6),  # no own link: half over 3, whose only link to 7 then carries half of two links
    ],
)
def test_shares_by_hand(topology, groups, share):
    assert ring_share(topology, groups) == pytest.approx(share)


def test_exchanges_by_hand():
    assert exchange_share(MESH, ((0, 1, 2, 3),)) == pytest.approx(1)
    assert exchange_share(MESH, ((0, 1), (2, 3))) == pytest.approx(1 / 3)
    # In a ring of 8, a member sends to 4 at distance 1, 2, 3, 4 each way: 8 nodes * 16 hops / 16 directed links = 8.
    assert exchange_share(RING, (ALL,)) == pytest.approx(7 / 8 / 2)
    assert send_share(RING, ((0, 1), (1, 2))) == pytest.approx(1 / 2)
    assert send_share(RING, ((0, 2), (1, 2))) == pytest.approx(1 / 4)
    assert send_share(CUBE, ((0, 4),)) == pytest.approx(2 / 6)
    assert send_share(make_topology("switch", 8), ((0, 1),)) == 1


@pytest.mark.parametrize(("kind", "size"), [("cube-mesh", 4), ("mesh", 1), ("ring", 1)])
def test_graphs_that_can_not_be(kind, size):
    with pytest.raises(ValueError, match=r"cube-mesh joins 8|has no links"):
        make_topology(kind, size)


def random_graph(seed: int, size: int) -> Topology:
    generator = random.Random(seed)
    chosen = {(a, a + 1): generator.randint(1, 2) for a in range(size - 1)}  # a chain, so that it is joined
    for pair in itertools.combinations(range(size), 2):
        if generator.random() < 0.5:
            chosen[pair] = generator.randint(1, 2)
    edges = tuple((a, b, links) for (a, b), links in chosen.items())
    check_edges(edges, size)
    return make_topology("edges", size, edges)


def most_disjoint(topology: Topology, closed: bool) -> int:
    """By trying every sequence of rings (or chains) over all nodes, links counted one by one."""

    def ways() -> set[tuple[tuple[int, int], ...]]:
        rings = set()
        for order in itertools.permutations(range(topology.size)):
            steps = list(itertools.pairwise([*order, order[0]] if closed else order))
            rings.add(tuple(sorted(tuple(sorted(step)) for step in steps)))
        return rings

    def best(free: Counter, left: list) -> int:
        if not left:
            return 0
        ring, tail = left[0], left[1:]
        without = best(free, tail)
        if all(free[pair] > 0 for pair in ring):
            free.subtract(ring)
            without = max(without, 1 + best(free, left))
            free.update(ring)
        return without

    free = Counter({(a, b): links for a, b, links in topology.edges})
    possible = [ring for ring in ways() if all(free[pair] for pair in ring)]
    return best(free, possible)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(3, 5))
def test_ring_links_equal_brute_force(seed, size):
    topology = random_graph(seed, size)
    rings = most_disjoint(topology, closed=True)
    expected = 2 * rings if rings else 2 * (size - 1) / size * 0.5 * most_disjoint(topology, closed=False)
    assert ring_links(topology, tuple(range(size))) == pytest.approx(expected)


def by_paths(topology: Topology, demands: list[tuple[int, int]]) -> float:
    """The busiest single link, with every shortest path over single links counted (parallel links are told apart)."""
    links = [(a, b, index) for a, b, count in topology.edges for index in range(count)]
    links += [(b, a, index) for a, b, index in links]

    def shortest(start: int, end: int) -> list[list[tuple[int, int, int]]]:
        paths: list[tuple[int, list]] = [(start, [])]
        while True:
            arrived = [path for node, path in paths if node == end]
            if arrived:
                return arrived
            paths = [(link[1], [*path, link]) for node, path in paths for link in links if link[0] == node]

    load: Counter = Counter()
    for start, end in demands:
        # Evenly at each node over the links that lead closer, as routers do.
        weights: list[tuple[float, list]] = [(1.0, path) for path in shortest(start, end)]
        for _, path in weights:
            weight = 1.0
            for step, link in enumerate(path):
                choices = {p[step] for _, p in weights if p[:step] == path[:step]}
                weight /= len(choices)
                del link
            for link in path:
                load[link] += weight
    return max(load.values())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(3, 5))
def test_exchange_equals_counting_every_path(seed, size):
    topology = random_graph(seed, size)
    nodes = tuple(range(size))
    load = by_paths(topology, list(itertools.permutations(nodes, 2)))
    assert exchange_share(topology, (nodes,)) == pytest.approx((size - 1) / load / topology.degree)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(3, 6), more=st.integers(0, 14))
def test_a_share_is_a_share_and_a_link_more_never_hurts_a_ring(seed, size, more):
    topology = random_graph(seed, size)
    nodes = tuple(range(size))
    assert 0 < ring_share(topology, (nodes,)) <= 1 and 0 < exchange_share(topology, (nodes,)) <= 1
    pairs = list(itertools.combinations(nodes, 2))
    pair = pairs[more % len(pairs)]
    edges = {(a, b): links for a, b, links in topology.edges}
    edges[pair] = edges.get(pair, 0) + 1
    richer = make_topology("edges", size, tuple((a, b, links) for (a, b), links in edges.items()))
    assert ring_links(richer, nodes) >= ring_links(topology, nodes) - 1e-9
