"""Cheapest paths against scipy's, and what an exchange moves against a count of every element."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import numpy as np
import pytest

from autoshard.costs import buffers
from autoshard.ir.layout import PARTIAL, REPLICATE, Layout, Shard, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.redistribute import shortest_paths
from autoshard.redistribute.shortest_paths import StepGraph, shortest, step_graph

# --- shortest ways against scipy's, with ties, and without a way ---


def random_steps(seed: int) -> tuple[StepGraph, np.ndarray]:
    """Few prices, so that many ways are as short as others; some states are in no step."""
    rng = np.random.default_rng(seed)
    states, count = int(rng.integers(1, 20)), int(rng.integers(0, 60))
    start, stop = rng.integers(0, states, (2, count))
    seconds = rng.integers(1, 4, count) * float(rng.choice([1.0, 0.1, 1e-12]))
    return step_graph(states, start, stop, seconds), rng.integers(0, states, int(rng.integers(1, 8)))


@pytest.mark.parametrize("seed", range(60))
def test_seconds_are_those_of_dijkstra_and_ways_take_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, starts = random_steps(seed)
    seconds, previous = shortest(steps, starts)
    monkeypatch.setattr(shortest_paths, "_MOST", -1)
    other, _ = shortest(steps, starts)
    assert seconds.tobytes() == other.tobytes()  # to the last digit
    price: dict[tuple[int, int], float] = {}
    for a, b, c in zip(steps.start.tolist(), steps.stop.tolist(), steps.seconds.tolist(), strict=True):
        price[a, b] = min(c, price.get((a, b), np.inf))
    for row, first in enumerate(starts.tolist()):
        for state in range(steps.states):
            before = int(previous[row, state])
            if state == first or not np.isfinite(seconds[row, state]):
                assert before < 0
            else:
                assert seconds[row, state] == seconds[row, before] + price[before, state]


def test_few_states_do_not_read_scipy() -> None:
    """It takes as long to import as a small model to plan."""
    code = """
import sys
from autoshard import redistribute
from autoshard.ir.layout import Layout, Replicate, Shard
from autoshard.ir.mesh import Mesh
from autoshard.redistribute.path_costs import path_parts
from autoshard.redistribute import Terms
terms = Terms((64, 64), "float32", Mesh.parse("dp=2,tp=4"), True, lambda axes, kind, size: 1e-6 + 1e-9 * size)
some = [Layout((a, b)) for a in (Replicate(), Shard(0), Shard(1)) for b in (Replicate(), Shard(0), Shard(1))]
redistribute.all_pairs(some, some, terms), path_parts(some, some, terms), redistribute.path(some[1], some[5], terms)
assert "scipy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what an exchange moves between the devices of a group, against a count of every element ---


MESHES = ((("a", 2),), (("a", 2), ("b", 3)), (("a", 4), ("b", 2), ("c", 2)))


def _elements(shape: tuple[int, ...], layout: Layout, mesh: Mesh, at: tuple[int, ...]) -> set[tuple[int, ...]]:
    dims = [
        [i for start, stop in size.intervals(mesh, at) for i in range(start, stop)]
        for size in local_sizes(shape, layout, mesh)
    ]
    return set(itertools.product(*dims))


def _counted(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...], before: Layout, after: Layout) -> buffers.Route:
    moved = [mesh.index(axis) for axis in axes]
    at = [
        tuple(dict(zip(moved, place, strict=True)).get(axis, 0) for axis in range(len(mesh.axes)))
        for place in itertools.product(*(range(mesh.sizes[axis]) for axis in moved))
    ]
    same = [a for a in moved if not (isinstance(before.placements[a], Shard) or _is_summed(before, after, a))]
    have, need = ([_elements(shape, layout, mesh, place) for place in at] for layout in (before, after))

    def common(giver: int, taker: int) -> int:
        if any(at[giver][axis] != at[taker][axis] for axis in same):
            return 0
        return len(have[giver] & need[taker])

    routes = []
    for here in range(min(len(at), buffers.MEMBERS)):
        others = [n for n in range(len(at)) if n != here]
        each = [n for other in others for n in (common(here, other), common(other, here))]
        routes.append((sum(each), common(here, here), max([*each, common(here, here)])))
    return buffers.Route(*map(max, zip(*routes, strict=True)))


def _is_summed(before: Layout, after: Layout, axis: int) -> bool:
    return before.placements[axis] == PARTIAL != after.placements[axis]


@pytest.mark.parametrize("seed", range(4))
def test_a_route_has_every_element_that_moves(seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(40):
        mesh = Mesh(drawn.choice(MESHES))
        shape = tuple(drawn.choice([1, 5, 6, 8, 12]) for _ in range(drawn.randrange(3)))
        before, after = (Layout(tuple(_placement(drawn, shape) for _ in mesh.axes)) for _ in range(2))
        axes = tuple(name for name in mesh.names if drawn.random() < 0.7) or mesh.names[:1]
        route = buffers._route(mesh, axes, shape, before, after)
        assert route == _counted(mesh, axes, shape, before, after), (mesh, axes, shape, str(before), str(after))


def _placement(drawn: random.Random, shape: tuple[int, ...]) -> Shard | object:
    if not shape or drawn.random() < 0.4:
        return drawn.choice([REPLICATE, PARTIAL])
    dim = drawn.randrange(len(shape))
    blocks = drawn.choice([count for count in (1, 2, 3) if shape[dim] % count == 0])
    unit = drawn.choice([size for size in (1, 2) if shape[dim] // blocks % size == 0])
    return Shard(dim, blocks=blocks, unit=unit)
