"""Parallel modes by name, and pins beside a style."""

from __future__ import annotations

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.styles.parallel_mode import MODES, of_mode, read_mode
from tests.graphs import mlp_graph

GRAPH, HARDWARE, MESH = mlp_graph(3, 1024, 2048), load_hardware("a100-80g-sxm"), Mesh.parse("dp=2,tp=2")


def test_semi_auto_is_data_parallel_but_for_pins() -> None:
    strategy, mesh = of_mode(read_mode("semi_auto_parallel"), "best", MESH, None, True)
    assert mesh == MESH
    pins = ("h.1.fc=Shard(1)@tp,Replicate@dp",)
    plan = search(GRAPH, HARDWARE, SearchRequest(MESH, strategy=strategy, pins=pins))
    free = search(GRAPH, HARDWARE, SearchRequest(MESH, strategy=of_mode("data-parallel", "best", MESH, None, False)[0]))
    differ = {op.op for op, other in zip(plan.ops, free.ops, strict=True) if op.strategy != other.strategy}
    assert {op.op for op in plan.ops if op.decided_by == "pin"} == differ == {"linear_1"}
    assert {str(one.layout) for one in free.parameters} == {"R R"}
    assert {op.strategy for op in free.ops if op.op.startswith("linear")} == {free.ops[0].strategy}


def test_names() -> None:
    assert [read_mode(name) for name in MODES] == list(MODES)
    assert read_mode("auto_parallel") == "auto" and read_mode("hybrid_parallel") == "semi-auto"
    assert of_mode("stand-alone", "best", None, None, False)[1] == Mesh((("dp", 1),))
    assert of_mode("auto", "megatron", MESH, None, True) == ("megatron", MESH)


@pytest.mark.parametrize(
    ("mode", "strategy", "pins", "says"),
    [
        ("stand-alone", "best", False, "runs on one device, and there are 4"),
        ("data-parallel", "best", True, "takes no pins"),
        ("semi-auto", "megatron", False, "both say how to split"),
    ],
)
def test_what_can_not_be(mode: str, strategy: str, pins: bool, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        of_mode(mode, strategy, MESH, None, pins)
