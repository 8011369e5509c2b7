"""A formulation with fewer choices costs what the whole one does, and forbids what it should."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.fewer_choices import narrowed
from autoshard.formulation.formulate import formulate
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import memory, objective
from tests.graphs import mlp_graph

WHOLE = formulate(mlp_graph(3, 64, 64), Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm"), math.inf)


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_the_same_choice_costs_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [len(node.seconds) for node in WHOLE.problem.nodes]
    some = [n for n in range(len(sizes)) if rng.random() < 0.4]
    keep = {n: sorted(rng.choice(sizes[n], int(rng.integers(1, sizes[n] + 1)), replace=False).tolist()) for n in some}
    small = narrowed(WHOLE, keep)
    choice = [int(rng.integers(len(node.seconds))) for node in small.problem.nodes]
    same = [keep[n][s] if n in keep else s for n, s in enumerate(choice)]
    assert objective(small.problem, choice) == objective(WHOLE.problem, same)
    assert np.array_equal(memory(small.problem, choice), memory(WHOLE.problem, same))
    for n, site in enumerate(small.sites):
        own, whole = (s.strategies or s.layouts for s in (site, WHOLE.sites[n]))
        assert own[choice[n]] == whole[same[n]]


def test_equal_layers_go_on_sharing_arrays() -> None:
    linears = [n for n, site in enumerate(WHOLE.sites) if site.name in ("linear_1", "linear_2")]
    small = narrowed(WHOLE, {n: [0, 2] for n in linears})
    one, other = (small.problem.nodes[n].seconds for n in linears)
    before = [WHOLE.problem.nodes[n].seconds for n in linears]
    assert (one is other) == (before[0] is before[1])
    assert before[0] is before[1]
    assert small.sites[linears[0]].strategies is small.sites[linears[1]].strategies


@pytest.mark.parametrize("kept", [0, 1])
def test_a_target_that_is_not_taken_is_forbidden(kept: int) -> None:
    v = next(v for v, site in enumerate(WHOLE.values) if site.tensor == "linear_0")
    small = narrowed(WHOLE, {}, {v: [kept]})
    seconds = small.problem.values[v].seconds
    assert np.isinf(np.delete(seconds, kept, axis=1)).all()
    assert np.array_equal(seconds[:, kept], WHOLE.problem.values[v].seconds[:, kept])
