"""Mesh search and the front of time against memory."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError, UsageError
from autoshard.ir.mesh import Mesh
from autoshard.search import memory_fit, pareto_front
from autoshard.search.mesh_search import compute_bound, meshes, search_meshes
from autoshard.search.objectives import MEMORY
from autoshard.search.search_request import SearchRequest
from autoshard.search.search_task import prepare
from autoshard.search.select_plan import best, search
from autoshard.solvers.common.solver_options import Clock, Options
from autoshard.text.answer_labels import certainty
from autoshard.text.plan_figures import certificate_rows
from tests.graphs import mlp_graph

HARDWARE = load_hardware("a100-80g-sxm")
GRAPH = mlp_graph(2, 512, 4096)


def test_every_factorisation_of_a_power_of_two() -> None:
    shapes = [mesh.sizes for mesh in meshes(HARDWARE, 64)]
    wanted = [s for n in (1, 2, 3) for s in itertools.product(range(2, 65), repeat=n) if math.prod(s) == 64]
    assert sorted(shapes) == sorted(wanted)
    assert [len(sizes) for sizes in shapes] == sorted(len(sizes) for sizes in shapes)
    assert meshes(HARDWARE, 64)[-1].names == ("outer", "middle", "inner")


def test_node_boundaries_are_respected() -> None:
    """24 devices are three nodes of 8: groups of 3, 6 or 12 consecutive ranks would lie across nodes."""
    shapes = [mesh.sizes for mesh in meshes(HARDWARE, 24)]
    assert (3, 8) in shapes and (6, 4) in shapes and (24,) in shapes
    assert not {(8, 3), (4, 6), (2, 12)} & set(shapes)
    assert [mesh.sizes for mesh in meshes(HARDWARE, 1)] == [(1,)]
    assert [mesh.sizes for mesh in meshes(HARDWARE, 7)] == [(7,)]


def test_the_best_mesh_is_found_and_the_others_told() -> None:
    plan = search_meshes(GRAPH, HARDWARE, SearchRequest(devices=8))
    each = {mesh: search(GRAPH, HARDWARE, SearchRequest(mesh)) for mesh in meshes(HARDWARE, 8)}
    assert plan.predicted_seconds == min(other.predicted_seconds for other in each.values())
    rows = {row.mesh: row for row in plan.search.meshes}
    assert set(rows) == set(each)
    assert rows[plan.mesh].outcome == "chosen" == plan.search.meshes[0].outcome
    assert [row.outcome for row in plan.search.meshes].count("chosen") == 1
    for mesh, row in rows.items():
        if row.predicted_seconds:
            assert row.bound_seconds <= each[mesh].predicted_seconds <= row.predicted_seconds * (1 + 1e-9)
        else:
            assert row.outcome == "not faster, by its bound"
            assert plan.predicted_seconds <= row.bound_seconds <= each[mesh].predicted_seconds


def test_a_bound_on_one_of_several_meshes_says_so() -> None:
    """What is proved of the plans on the chosen mesh is not proved of those on the others."""
    graph = mlp_graph(1, 16, 16)
    plan = search_meshes(graph, HARDWARE, SearchRequest(devices=4))
    alone = search(graph, HARDWARE, SearchRequest(plan.mesh))
    texts = [[certainty(candidate), *map(" ".join, certificate_rows(candidate))] for candidate in (plan, alone)]
    assert ["on this mesh" in text for text in texts[0]] == [True, False, True]
    assert not any("on this mesh" in text for text in texts[1])


def test_the_bound_is_below_every_simulated_step() -> None:
    for mesh in (Mesh.parse("tp=4"), Mesh.parse("dp=2,tp=2")):
        task = prepare(GRAPH, mesh, HARDWARE, SearchRequest())
        plan = best(*memory_fit.fitted(task))
        assert 0 < compute_bound(task) <= min(c.predicted_seconds for c in plan.search.candidates)


def test_meshes_that_can_not_be() -> None:
    with pytest.raises(UsageError, match="--devices 100000: a100-80g-sxm describes at most"):
        search_meshes(GRAPH, HARDWARE, SearchRequest(devices=100000))
    with pytest.raises(InfeasibleError):
        search_meshes(GRAPH, HARDWARE, SearchRequest(devices=4, memory_limit_bytes=1024.0))
    with pytest.raises(UsageError, match="unknown mesh axis 'tp'"):
        search_meshes(GRAPH, HARDWARE, SearchRequest(devices=4, pins=("x=Shard(0)@tp",)))
    pinned = search_meshes(GRAPH, HARDWARE, SearchRequest(devices=4, pins=("x=Shard(0)@inner",)))
    assert {row.mesh.sizes: row.outcome for row in pinned.search.meshes}[(4,)] == "not possible"
    assert pinned.search.pins == ("x=Shard(0)@inner",)


def test_least_memory_chooses_its_mesh_by_memory() -> None:
    plan = search_meshes(mlp_graph(2, 64, 64), HARDWARE, SearchRequest(devices=4, level=MEMORY))
    peaks = [row.predicted_peak_bytes for row in plan.search.meshes if row.predicted_peak_bytes]
    assert plan.predicted_peak_bytes == min(peaks)


def test_a_stopped_clock_leaves_meshes_out_and_says_so() -> None:
    clock = Clock()
    clock.stop()
    plan = search_meshes(GRAPH, HARDWARE, SearchRequest(devices=16), options=Options(clock))
    outcomes = [row.outcome for row in plan.search.meshes]
    assert outcomes.count("chosen") == 1
    assert outcomes.count("out of time") == len(outcomes) - 1
    assert plan.search.cut_short


def test_the_front() -> None:
    task = prepare(GRAPH, Mesh.parse("dp=2,tp=2"), HARDWARE, SearchRequest())
    plan = best(*memory_fit.fitted(task))
    points = pareto_front.front(task, plan, 5)
    ahead = [point for point in points if point.front]
    assert len(ahead) > 1
    assert [p.predicted_seconds for p in ahead] == sorted(p.predicted_seconds for p in ahead)
    assert [p.predicted_peak_bytes for p in ahead] == sorted((p.predicted_peak_bytes for p in ahead), reverse=True)
    for point in points:
        worse = [
            other
            for other in points
            if other != point
            and other.predicted_seconds <= point.predicted_seconds
            and other.predicted_peak_bytes <= point.predicted_peak_bytes
        ]
        assert point.front == (not worse)
    assert plan.predicted_seconds == ahead[0].predicted_seconds
    assert json.loads(pareto_front.as_json(points))["points"][0]["front"] is True
    drawing = pareto_front.plot(points, "a model")
    assert drawing.startswith("<?xml") and "a model" in drawing
    assert drawing == pareto_front.plot(points, "a model")
