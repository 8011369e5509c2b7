"""Which plans a search simulates, beside the first, at level 1 and within a limit."""

from __future__ import annotations

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.ir.mesh import Mesh
from autoshard.search.search_request import SearchRequest
from autoshard.search.search_task import SearchTask
from autoshard.search.select_plan import search
from tests.graphs import mlp_graph


def test_limits_of_memory_get_wider_while_that_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """At level 1 programs of more and more of the solver's bytes are tried, up to one that needs more."""
    graph, mesh, hardware = mlp_graph(3, 256, 2048), Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm")
    limits: list[float] = []
    quickly = SearchTask.quickly
    monkeypatch.setattr(SearchTask, "quickly", lambda task, p: (limits.append(p.capacity_bytes), quickly(task, p))[1])
    tried = search(graph, hardware, SearchRequest(mesh, level=1)).search.candidates
    assert sum(limit < float("inf") for limit in limits) == 2  # no proof is looked for: seconds only break ties
    (first,) = [row.predicted_peak_bytes for row in tried if row.name == "least memory"]
    wider = [row for row in tried if " within " in row.name]
    assert len(wider) == 2 and wider[0].outcome == "chosen"
    assert wider[0].predicted_peak_bytes < first < wider[1].predicted_peak_bytes
    assert tried[-1] == wider[1]  # nor others that know no limit


def test_within_a_limit_plans_of_a_step_are_tried_too() -> None:
    """Known styles and what the step search found without a limit: no plan is slower than one of these that fits."""
    graph, mesh, hardware = mlp_graph(4, 4096, 1024), Mesh.parse("dp=2,tp=4"), load_hardware("a100-80g-sxm")
    free = search(graph, hardware, SearchRequest(mesh))
    least = search(graph, hardware, SearchRequest(mesh, level=1))
    limit = (free.predicted_peak_bytes + least.predicted_peak_bytes) / 2
    found = search(graph, hardware, SearchRequest(mesh, memory_limit_bytes=limit))
    names = [row.name for row in found.search.candidates]
    assert "least of a step within the limit" in names and free.search.candidates[0].name in names
    fsdp = search(graph, hardware, SearchRequest(mesh, memory_limit_bytes=limit, strategy="fsdp"))
    assert found.predicted_peak_bytes <= limit and found.predicted_seconds <= fsdp.predicted_seconds
