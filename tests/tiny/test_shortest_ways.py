"""Shortest ways against scipy's, with ties, and without a way."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from autoshard.redistribute import shortest_ways
from autoshard.redistribute.shortest_ways import StepGraph, shortest, step_graph


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
    monkeypatch.setattr(shortest_ways, "_MOST", -1)
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
from autoshard.redistribute.way_parts import way_parts
from autoshard.redistribute import Terms
terms = Terms((64, 64), "float32", Mesh.parse("dp=2,tp=4"), True, lambda axes, kind, size: 1e-6 + 1e-9 * size)
some = [Layout((a, b)) for a in (Replicate(), Shard(0), Shard(1)) for b in (Replicate(), Shard(0), Shard(1))]
redistribute.all_pairs(some, some, terms), way_parts(some, some, terms), redistribute.path(some[1], some[5], terms)
assert "scipy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
