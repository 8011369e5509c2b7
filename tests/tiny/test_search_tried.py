"""Which plans a search simulates, beside the first, at level 1 and within a limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InfeasibleError
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.ir.mesh import Mesh
from autoshard.search import min_memory
from autoshard.search.search_request import SearchRequest
from autoshard.search.search_task import SearchTask
from autoshard.search.select_plan import search
from autoshard.solvers.relax.lean_plans import LeanPlans
from autoshard.workflow import make_plan
from tests.graphs import mlp_graph
from tests.slow import slow


def test_limits_of_memory_get_wider_while_that_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """At level 1 programs of more and more of the solver's bytes are tried, up to one that needs more."""
    graph, mesh, hardware = mlp_graph(3, 256, 2048), Mesh.parse("dp=2,tp=2"), load_hardware("a100-80g-sxm")
    limits: list[float] = []
    quickly = SearchTask.quickly
    monkeypatch.setattr(SearchTask, "quickly", lambda task, p: (limits.append(p.capacity_bytes), quickly(task, p))[1])
    tried = search(graph, hardware, SearchRequest(mesh, level=1)).search.candidates
    assert sum(limit < float("inf") for limit in limits) == 2  # no proof is looked for: seconds only break ties
    (first,) = [row.predicted_peak_bytes for row in tried if row.name == "least memory"]
    least, wider = [row for row in tried if " within " in row.name]
    assert least.outcome == "chosen" and least.predicted_peak_bytes < first < wider.predicted_peak_bytes
    assert tried[-1] == wider and limits[-1] < float("inf")  # nor others that know no limit


def test_prices_of_bytes_give_programs_that_need_less() -> None:
    """At level 1 beside the least memory by the solver's count; and within a limit that nothing else fits."""
    graph, mesh, hardware = mlp_graph(6, 64, 4096), Mesh.parse("dp=4,tp=4"), load_hardware("a100-80g-sxm")
    least = search(graph, hardware, SearchRequest(mesh, level=1))
    (chosen,) = [row for row in least.search.candidates if row.outcome == "chosen"]
    assert chosen.name.endswith("of a step for 1 % of memory")
    others = [row.predicted_peak_bytes for row in least.search.candidates if row != chosen]
    limit = (least.predicted_peak_bytes + min(others)) / 2
    assert search(graph, hardware, SearchRequest(mesh, memory_limit_bytes=limit)).predicted_peak_bytes <= limit


def test_prices_are_lowered_until_plans_are_clearly_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is simulated that is counted at more than any that could win, and larger problems end there."""
    monkeypatch.setattr(min_memory, "FEW_CHOICES", 0)
    tried: list[float] = []
    at_rate = LeanPlans.at_rate
    monkeypatch.setattr(LeanPlans, "at_rate", lambda plans, rate: (tried.append(rate), at_rate(plans, rate))[1])
    graph, mesh, hardware = mlp_graph(4, 4096, 1024), Mesh.parse("dp=2,tp=4"), load_hardware("a100-80g-sxm")
    monkeypatch.setattr(min_memory, "_CLEARLY", 1.0)
    monkeypatch.setattr(min_memory, "_FAR", 100.0)
    rows = search(graph, hardware, SearchRequest(mesh, level=1)).search.candidates
    assert 0 < len(tried) < len(min_memory.RATES) and not [row for row in rows if " within " in row.name]
    assert rows[-1].predicted_peak_bytes > min(row.predicted_peak_bytes for row in rows)
    for name, value in {"_IN_A_ROW": 100, "_FAR": 0.0}.items():  # the count says little of programs far above it
        tried.clear()
        with monkeypatch.context() as patch:
            patch.setattr(min_memory, name, value)
            search(graph, hardware, SearchRequest(mesh, level=1))
        assert tried == list(min_memory.RATES)
    tried.clear()
    monkeypatch.setattr(min_memory, "_CLEARLY", 0.5)
    assert len(search(graph, hardware, SearchRequest(mesh, level=1)).search.candidates) == 1 and tried == [5]


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


@pytest.mark.parametrize("level", [slow(0), 1, 2])
def test_a_limit_that_a_known_style_keeps_is_not_refused(level: int) -> None:
    """The solver counts more of it than of others, whose programs need more."""
    graph = transformer_graph(Transformer(2, 256, 4, 128, 8192), 4, "bf16-mixed", "adamw").graph
    hardware, mesh = load_hardware("h100-80g-sxm"), Mesh.parse("dp=2,tp=2")
    limit = search(graph, hardware, SearchRequest(mesh, strategy="fsdp-tp")).predicted_peak_bytes
    plan = search(graph, hardware, SearchRequest(mesh, level=level, memory_limit_bytes=limit))
    assert plan.predicted_peak_bytes <= limit


def test_a_count_that_programs_may_need_less_than_proves_nothing_of_them() -> None:
    graph, hardware = mlp_graph(3, 16, 32), load_hardware("h100-80g-sxm")
    with pytest.raises(InfeasibleError, match=r"not proven: .*; as the solver counts, no plan fits: every") as caught:
        search(graph, hardware, SearchRequest(Mesh.parse("tp=2"), memory_limit_bytes=29000.0))
    assert not caught.value.proven


def test_no_time_at_all_is_enough_for_known_styles() -> None:
    request = SearchRequest(Mesh.parse("dp=2,tp=2"), time_limit_seconds=0.0)
    made = make_plan(mlp_graph(2, 64, 256), load_hardware("h100-80g-sxm"), request)
    assert made.plan.certificate.status == "cut short" and made.plan.certificate.level_bound == 0.0
    taken = [style.predicted_seconds for style in made.styles if style.predicted_seconds]
    assert len(taken) > 1 and made.plan.predicted_seconds <= min(taken) * (1 + 1e-9)


def test_a_hint_names_nothing_that_is_so_already() -> None:
    graph, hardware = mlp_graph(3, 16, 32), load_hardware("h100-80g-sxm")
    request = SearchRequest(Mesh.parse("tp=2"), memory_limit_bytes=1000.0)
    hints = []
    for own in (graph, replace(graph, precision="bf16-mixed", optimizer="sgd")):
        with pytest.raises(InfeasibleError) as caught:
            search(own, hardware, request)
        hints.append(caught.value.hint)
    assert hints == [
        "more devices, --precision bf16-mixed, --optimizer sgd or a smaller batch",
        "more devices or a smaller batch",
    ]
