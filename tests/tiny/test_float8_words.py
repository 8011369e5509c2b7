"""What a summary says of float8, and that a check at other sizes knows what did not run in it."""

from __future__ import annotations

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.graph_capture.training.precision import apply_precision
from autoshard.graph_capture.training.requires_grad import mark_gradients
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.text.float8_words import float8_words
from autoshard.text.plan_summary import summary
from autoshard.verification.coverage import plan_kinds
from tests.rule_graphs import gpt


def planned(precision: str, mesh: str, seq: int = 16) -> tuple[Plan, Graph]:
    graph = apply_precision(mark_gradients(gpt(batch=4, seq=seq, width=64, heads=4, words=96)), precision)
    request = SearchRequest(Mesh.parse(mesh), strategy="megatron")
    return search(graph, load_hardware("h100-80g-sxm"), request), graph


def test_other_precisions_say_nothing() -> None:
    plan, graph = planned("bf16-mixed", "dp=1,tp=2")
    assert float8_words(plan, graph) == "" and "in float8" not in summary(plan, graph)


@pytest.mark.parametrize(
    ("mesh", "seq", "whole", "uneven"),
    [
        ("dp=1,tp=2", 16, 4, []),
        ("dp=4,tp=1", 8, 0, ["0.qkv", "0.out", "0.up", "0.down"]),  # a device has 8 rows
        ("dp=1,tp=8", 16, 2, ["0.qkv", "0.out"]),  # and here of 4 heads of 16 some have half or none
    ],
)
def test_it_counts_what_shards_allow(mesh: str, seq: int, whole: int, uneven: list[str]) -> None:
    plan, graph = planned("fp8-mixed", mesh, seq)
    words, head = float8_words(plan, graph), "head (no other layer follows: a head keeps its precision)"
    assert words.startswith(f"{whole} of 5 linear layers; in bfloat16 {head};") and words in " ".join(
        summary(plan, graph, width=10_000).split()
    )
    told = f"{', '.join(uneven[:2])}{' and 2 more' * (len(uneven) > 2)} (a shard has rows or a dim that are no multiple"
    assert (told in words) == bool(uneven)
    kinds = [kind for kind in plan_kinds(plan, graph) if kind.startswith("autoshard.float8_linear")]
    assert any(" in bfloat16: " in kind for kind in kinds) == bool(uneven)
    assert any(" in bfloat16: " not in kind for kind in kinds) == bool(whole)
