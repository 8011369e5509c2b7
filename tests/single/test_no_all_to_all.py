"""`--no-all-to-all`: neither a redistribution nor a variant of a plan exchanges anything."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.mesh import Mesh
from autoshard.rules.operators import EXCHANGING
from autoshard.workflow import ModelRequest, read_graph
from tests.slow import quick_at

MODELS = [
    ("tests/small_models.py:mixtral", {"batch": 4, "sequence": 8}, {"dispatched_experts"}),
    ("examples/lenet.py:build", {"batch": 4}, {"halo_convolution"}),
]


@pytest.mark.parametrize(("model", "arguments", "exchanging"), quick_at(MODELS, 1))
def test_no_variant_exchanges(model: str, arguments: dict[str, Any], exchanging: set[str]) -> None:
    graph = read_graph(ModelRequest(model, arguments))
    mesh, hardware = Mesh.parse("tp=2"), load_hardware("a100-80g-sxm")

    def variants(all_to_all: bool) -> set[str]:
        formulation = formulate(PlanningContext(graph, mesh, hardware, all_to_all=all_to_all))
        return {strategy.variant for site in formulation.sites for strategy in site.strategies}

    assert variants(True) >= exchanging
    assert not variants(False) & EXCHANGING
