"""The search for places against all assignments of a small model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.errors import UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, StepPlan
from autoshard.program.schedules.placed_parts import parts_on
from autoshard.search.fixed_step import predicted, with_place_plans, with_step
from autoshard.search.places import place_search
from autoshard.search.places.place_search import searched_places, units_of
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests.slow import quick_at

SPEC = f"{__file__}:build"


class Towers(nn.Module):
    """Two towers of unequal work, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.head = nn.Linear(512, 256), nn.Linear(512, 2048), nn.Linear(2304, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.small(x), self.large(x)], 1)).mean()


def build() -> tuple[nn.Module, tuple[Tensor]]:
    return Towers(), (torch.randn(4096, 512),)


@cache
def planned(count: int = 3, own: tuple[str, ...] = ()) -> tuple[Plan, Graph]:
    """`own`: meshes of places."""
    graph = capture(SPEC, {})

    def searched(mesh: Mesh, first: int = 0) -> Plan:
        return search(graph, load_hardware("a100-80g-sxm"), SearchRequest(mesh))

    plan = with_place_plans(searched(Mesh.parse("dp=1")), StepRequest(place_mesh=own), searched)
    return replace(plan, step=StepPlan(count)), graph


def every(count: int, own_meshes: tuple[str, ...] = ()) -> dict[tuple[int, ...], float]:
    """The simulated step of each assignment of units in which each place has work."""
    plan, graph = planned(own=own_meshes)
    seconds = {}
    for unit_places in itertools.product(range(count), repeat=len(units_of(graph, [-1] * len(graph.ops)))):
        if len(set(unit_places)) == count:
            places = [0] * len(graph.ops)
            for unit, place in zip(units_of(graph, [-1] * len(graph.ops)), unit_places, strict=True):
                for i in unit:
                    places[i] = place
            step = replace(plan.step, parts=parts_on(graph, places))
            seconds[tuple(places)] = predicted(replace(plan, step=step), graph).step_seconds
    return seconds


@pytest.mark.parametrize(("count", "own"), quick_at([(2, ()), (3, ()), (2, ("1:dp=4",)), (3, ("0:dp=2", "2:tp=2"))], 0))
def test_the_best_of_all_assignments_is_found_and_none_is_below_the_bound(count: int, own: tuple[str, ...]) -> None:
    """On places with meshes of their own, too."""
    plan, graph = planned(own=own)
    result, known = searched_places(plan, graph, (), count, predicted), every(count, own)
    assert result.seconds == known[result.places] == min(known.values())
    assert 0 < result.bound_seconds <= result.seconds


def test_improved_starts_come_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_search, "MOST_TRIED", 7)  # fewer than there are
    plan, graph = planned()
    assert searched_places(plan, graph, (), 2, predicted).seconds <= 1.1 * min(every(2).values())


def test_what_a_user_placed_stays_there() -> None:
    plan, graph = planned()
    result = searched_places(plan, graph, (("small", 1), ("large", 1)), 2, predicted)
    place_of = {op.module: place for op, place in zip(graph.ops, result.places, strict=True)}
    assert place_of["small"] == place_of["large"] == 1


def test_places_inside_a_block_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where units are blocks, larger than what a user placed."""
    monkeypatch.setattr(place_search, "MOST_UNITS", 1)
    plan, graph = planned()
    named = replace(graph, ops=tuple(replace(op, module=f"layers.0.{op.module}") for op in graph.ops))
    result = searched_places(plan, named, (("layers.0.small", 1), ("layers.0.head", 0)), 2, predicted)
    place_of = {op.module: place for op, place in zip(named.ops, result.places, strict=True)}
    assert (place_of["layers.0.small"], place_of["layers.0.head"]) == (1, 0)


def test_its_plan_says_so() -> None:
    plan, graph = planned()
    staged = with_step(plan, graph, StepRequest(micro_batches=3, stages=2, place="auto"))
    assert staged.step.placed and staged.step.stages == 2
    assert any("no assignment of modules is below" in note for note in staged.search.notes)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"place": "best", "stages": 2}, "--place best: expected auto"),
        ({"place": "auto"}, "--place auto needs to know how many places there are"),
        ({"place": "auto", "stages": 2, "virtual_stages": 2}, "--virtual-stages and places both say"),
        ({"place": "auto", "stages": 99, "micro_batches": 2}, "in which each of 99 places has work"),
    ],
)
def test_every_mistake_of_it_has_a_sentence(said: dict[str, object], message: str) -> None:
    plan, graph = planned()
    with pytest.raises(UsageError, match=message):
        request = StepRequest(**said)  # type: ignore[arg-type]
        request.check()
        with_step(plan, graph, request)
