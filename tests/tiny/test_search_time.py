"""A search's budget is CPU time, and no answer is worse than the best known style, however small the budget is.

In float32: in mixed precision some styles are compared with tables gathered low, which the model itself does not have.
"""

from __future__ import annotations

import math
import time

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.ir import plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.search.mesh_search import STYLE_AXES, meshes, search_meshes
from autoshard.search.objectives import MEMORY, SPEED
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.search.style_plans import style_plans
from autoshard.solvers.common.result import fits
from autoshard.solvers.common.solver_options import Clock, Computing, Looks, Options
from autoshard.workflow import make_plan
from tests.slow import slow

HARDWARE = load_hardware("a100-80g-sxm")
GRAPH = transformer_graph(Transformer(2, 512, 8, 2048, 4096), 16, "fp32", "adamw").graph
MESH = Mesh.parse("dp=2,tp=2")


def best_style(graph: Graph, plans: list[Plan], limit: float, level: int = SPEED) -> float:
    """Of the styles on the meshes of these plans, the best that fits."""
    found = [style for plan in plans for style in style_plans(plan, graph, HARDWARE) if style.predicted_seconds]
    here = [style for style in found if fits(style.predicted_peak_bytes, limit)]
    return min((s.predicted_peak_bytes if level == MEMORY else s.predicted_seconds for s in here), default=math.inf)


@pytest.mark.parametrize(("level", "limited"), [(SPEED, False), slow(SPEED, True), slow(MEMORY, False), (MEMORY, True)])
def test_no_time_at_all_is_enough_for_known_styles(level: int, limited: bool) -> None:
    free = search(GRAPH, HARDWARE, SearchRequest(MESH))
    styles = [s.predicted_peak_bytes for s in style_plans(free, GRAPH, HARDWARE) if s.predicted_seconds]
    limit = min(styles) * 1.01 if limited else math.inf
    least = best_style(GRAPH, [free], limit, level)
    assert least < math.inf, "the test compares nothing"
    for number in (0, 1, 5, 50):
        wanted = SearchRequest(MESH, level=level, memory_limit_bytes=limit)
        plan = search(GRAPH, HARDWARE, wanted, options=Options(Clock(number, timer=Looks())))
        figure = plan.predicted_peak_bytes if level == MEMORY else plan.predicted_seconds
        assert figure <= least * (1 + 1e-9)
        assert plan.search.cut_short or number > 1


def test_no_time_at_all_is_enough_for_known_styles_on_any_mesh_of_theirs() -> None:
    graph = transformer_graph(Transformer(2, 512, 8, 2048, 4096), 2, "fp32", "adamw").graph
    each = [mesh for mesh in meshes(HARDWARE, 8) if len(mesh.axes) <= STYLE_AXES]
    plans = [search(graph, HARDWARE, SearchRequest(mesh), options=Options(Clock(0.0))) for mesh in each]
    least = best_style(graph, plans, HARDWARE.usable_memory_bytes)
    on_first = best_style(graph, plans[:1], HARDWARE.usable_memory_bytes)
    assert len(plans) > 2 and least < on_first, "the first mesh that is tried has not the best style"
    plan = search_meshes(graph, HARDWARE, SearchRequest(devices=8), options=Options(Clock(0.0)))
    assert plan.predicted_seconds <= least * (1 + 1e-9)
    assert plan.search.cut_short


@pytest.mark.parametrize("devices", [None, 4])
def test_a_machine_that_others_use_finds_the_same_plan(devices: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wall time runs a thousand times as fast as what the search computes."""
    mesh = MESH if devices is None else None
    alone = make_plan(GRAPH, HARDWARE, SearchRequest(mesh, devices=devices)).plan
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: 1000 * real())
    wanted = SearchRequest(mesh, devices=devices, time_limit_seconds=60.0)
    loaded = make_plan(GRAPH, HARDWARE, wanted).plan
    assert not loaded.search.cut_short
    assert plan_json.plan_hash(loaded, GRAPH) == plan_json.plan_hash(alone, GRAPH)


def test_cpu_time_stands_still_while_others_run() -> None:
    clock = Clock(0.5, timer=Computing())
    time.sleep(0.6)
    assert clock.left > 0.3
    until = time.process_time() + 0.6
    while time.process_time() < until:
        pass
    assert clock.over and clock.cut
