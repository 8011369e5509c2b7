"""Why a plan has what it has: the sentence differs by who decided and by what the plan was chosen for, and is true."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Candidate, Plan
from autoshard.package import package_files
from autoshard.search.objectives import MEMORY, RATIO
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.text.chosen_words import chosen_words, plan_words

HARDWARE = load_hardware("a100-80g-sxm")
MESH = Mesh.parse("dp=2,tp=2")


@cache
def graph() -> Graph:
    return transformer_graph(Transformer(2, 256, 8, 1024, 1024), 8, "bf16-mixed", "adamw").graph


def made(**asked: object) -> Plan:
    return search(graph(), HARDWARE, SearchRequest(MESH, **asked))  # type: ignore[arg-type]


def chosen_of(plan: Plan) -> Candidate:
    return next(own for own in plan.search.candidates if own.outcome == "chosen")


def with_candidates(plan: Plan, *rows: tuple[str, str, float, float]) -> Plan:
    """As if these had been simulated: (name, outcome, sum of costs, step)."""
    found = tuple(Candidate(*row, predicted_peak_bytes=1.0) for row in rows)
    return replace(plan, search=replace(plan.search, candidates=found))


def test_each_way_of_choosing_has_its_own_sentence() -> None:
    plans = {
        "search": made(),
        "pins": made(pins=(f"{graph().inputs[0]}=Shard(0)@dp",)),
        "style": made(strategy="megatron"),
        "memory": made(level=MEMORY),
        "ratio": made(level=RATIO),
    }
    said = {name: {chosen_words(plan, op) for op in plan.ops} for name, plan in plans.items()}
    assert said["style"] == {"--strategy megatron has it so."}
    assert all("needs the least memory" in words or "the one that was simulated" in words for words in said["memory"])
    assert not any("shortest" in words for words in said["memory"] | said["ratio"] | said["style"])
    pinned = replace(plans["search"].ops[0], decided_by="pin")
    assert chosen_words(plans["search"], pinned) == "It is pinned."


def test_a_simulated_plan_is_not_said_to_have_the_least_sum() -> None:
    plan = made()
    by_simulation = with_candidates(
        plan, ("weighted", "chosen", 2.0, 1.0), ("least sum of costs", "not better", 1.5, 1.2)
    )
    words = plan_words(by_simulation)
    assert "its simulated step, 1 s, is the shortest of 2 that were simulated" in words
    assert "its sum of costs is +500 ms from that of another (least sum of costs)" in words
    by_sum = with_candidates(plan, ("least sum of costs", "chosen", 1.5, 1.0), ("weighted", "not better", 2.0, 1.2))
    assert "and so is its sum of costs" in plan_words(by_sum)
    limited = with_candidates(plan, ("weighted", "too large", 1.0, 0.5), ("within the limit", "chosen", 2.0, 1.0))
    assert "the one that was simulated and fits (within the limit); 1 other did not fit" in plan_words(limited)
    assert "No search is recorded" in plan_words(with_candidates(plan))


@pytest.mark.parametrize("level", [2, MEMORY])
def test_the_sentence_of_a_search_is_true(level: int) -> None:
    plan = made(level=level)
    fitting = [own for own in plan.search.candidates if own.outcome != "too large"]
    own, words = chosen_of(plan), plan_words(plan)
    if "shortest" in words:
        assert own.predicted_seconds == min(other.predicted_seconds for other in fitting)
        least = own.objective_seconds <= min(other.objective_seconds for other in fitting) * (1 + 1e-9)
        assert ("so is its sum" in words) == least
    if "least memory" in words:
        assert own.predicted_peak_bytes == min(other.predicted_peak_bytes for other in fitting)


def test_the_panel_says_it_of_each_operator() -> None:
    plan = made()
    page = package_files.report_text(package_files.build(plan, graph(), HARDWARE))
    assert plan_words(plan) in page and "sum of all costs is least with it" not in page
