"""A plan in words: blocks folded, strategies named as people name them."""

from __future__ import annotations

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.ir.graph import Graph, Op, Tensor
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.replay.command_line import command
from autoshard.rules.algebra.strategy import Choice, Strategy
from autoshard.search.build_plan import Origin
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.text import plan_words
from autoshard.text.answer_words import gap_words
from autoshard.text.plan_summary import summary
from autoshard.text.tables import table, wrapped
from tests.graphs import mlp_graph

MESH = Mesh((("dp", 2), ("tp", 2)))
LINEAR = Op("linear", "aten.linear", ("x", "w", "b"), (), ("y",))
TENSORS = (*(Tensor(name, (4, 4), "float32") for name in "xwy"), Tensor("b", (4,), "float32"))
GRAPH = Graph("g", TENSORS, ("x",), (), (), (LINEAR,), ("y",), None)

SAID = [
    ("b n", "S0 R+|R+ S0|R+ S0|S0 S1", "batch split over dp, column-parallel over tp"),
    ("n n", "R+ R+|S0 S0|S0 S0|S1 S1", "column-parallel over dp and tp"),
    ("= m", "R S1|R S1|R P|R P", "replicated over dp, row-parallel over tp"),
    ("+ ~0", "R+ P|R+ R|R+ R|R+ P", "replicated with partial gradients over dp, partial sums propagated over tp"),
]


@pytest.mark.parametrize(("choices", "layouts", "said"), SAID, ids=[said for _, _, said in SAID])
def test_strategies(choices: str, layouts: str, said: str) -> None:
    *operands, result = (Layout.parse(text) for text in layouts.split("|"))
    strategy = Strategy(tuple(map(Choice.parse, choices.split())), tuple(operands), (result,))
    assert plan_words.strategy_words(LINEAR, strategy, GRAPH, MESH) == said


def test_axes_of_size_one_say_nothing() -> None:
    whole = Layout.parse("R R")
    strategy = Strategy((Choice("repeat"), Choice("repeat")), (whole, whole, whole), (whole,))
    assert plan_words.strategy_words(LINEAR, strategy, GRAPH, Mesh((("dp", 1), ("tp", 1)))) == "whole"


def test_repeated_blocks_are_folded() -> None:
    graph = mlp_graph(layers=6)
    plan = search(
        graph,
        load_hardware("a100-80g-sxm"),
        SearchRequest(Mesh((("dp", 2),)), origin=Origin("mlp.py:build", (("layers", 6),))),
    )
    blocks = plan_words.blocks(plan, graph)
    assert sum(len(block.names) * len(block.rows) for block in blocks) == len(graph.ops)
    names = [name for block in blocks for name in block.names]
    assert [name for name in names if name] == [f"h.{n}" for n in range(6)]
    assert any(len(block.names) > 1 for block in blocks)
    text = summary(plan, graph)
    assert "(6 devices)" not in text
    assert "mlp.py:build on dp=2 (2 devices) of a100-80g-sxm" in text
    assert next(block.title for block in blocks if len(block.names) > 1) in text
    assert gap_words(plan) == f"{1 - plan.certificate.level_bound / plan.predicted_seconds:.2%}"
    assert command(plan).startswith("autoshard plan mlp.py:build --with layers=6 --mesh dp=2 --hardware a100-80g-sxm")


def test_table() -> None:
    assert table([("a", "long cell", "x"), ("a title that spans", "", ""), ("b", "", "y")]) == [
        "a  long cell  x",
        "a title that spans",
        "b             y",
    ]


def test_a_long_name_breaks_behind_its_parts() -> None:
    assert wrapped("scaled_dot_product_attention", 25) == ["scaled_dot_product_", "attention"]
    assert wrapped("  model.layers.0.self_attn x", 14) == ["  model.", "  layers.0.", "  self_attn x"]
    assert wrapped("a" * 30, 20) == ["a" * 20, "a" * 10]
