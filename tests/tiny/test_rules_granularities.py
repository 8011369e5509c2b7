"""Granularities and strategies on GPT-2: the fused projection, uneven heads, what is left out, what runs on a shard."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from autoshard.errors import UsageError
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import AxisShard, LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.rules import (
    Strategy,
    carry,
    explain,
    find,
    granularities,
    localise,
    named,
    offered,
    operator_table,
    strategies,
)
from tests.rule_graphs import gpt, one_op

MEGATRON = {
    "0.norm1": "= +", "0.qkv": "= n/3", "0.split": "= c",
    **{f"0.view{i}": "= c" for i in range(3)}, **{f"0.swap{i}": "= c" for i in range(3)},
    "0.attention": "= h", "0.swap": "= b", "0.join": "= c", "0.out": "= m", "0.dropout": "= ~0",
}  # fmt: skip


def op_named(graph: Graph, name: str) -> Op:
    return next(op for op in graph.ops if op.name == name)


def chosen(graph: Graph, mesh: Mesh, texts: dict[str, str]) -> dict[str, Strategy]:
    grains = granularities(graph, mesh)
    return {name: find(graph, op_named(graph, name), mesh, grains, text) for name, text in texts.items()}


def mismatches(graph: Graph, strategies: dict[str, Strategy]) -> list[str]:
    """Values that would be redistributed between these ops."""
    result = []
    for name, strategy in strategies.items():
        for value, layout in zip(op_named(graph, name).results, strategy.results, strict=True):
            for consumer, position in graph.consumers[value]:
                if consumer.name in strategies and strategies[consumer.name].operands[position] != layout:
                    result.append(f"{value}: {layout} -> {strategies[consumer.name].operands[position]}")
    return result


def test_fused_projection_to_row_parallel_without_communication() -> None:
    graph, mesh = gpt(), Mesh.parse("dp=2,tp=2")
    plan = chosen(graph, mesh, MEGATRON)
    assert mismatches(graph, plan) == []
    assert [str(layout) for layout in plan["0.qkv"].operands] == ["R R+", "R S1/3", "R S0/3"]
    assert [str(layout) for layout in plan["0.out"].operands] == ["R S2", "R S0", "R P"]
    assert str(plan["0.out"].results[0]) == "R P"
    factors = dict.fromkeys(("0.qkv", "0.norm1", "0.out", "0.dropout"), "i0")
    batch = {name: text.replace("=", factors.get(name, "a"), 1) for name, text in MEGATRON.items()}
    both = chosen(graph, mesh, {**batch, "0.attention": "b h"})
    assert mismatches(graph, both) == []
    assert [str(layout) for layout in both["0.qkv"].operands] == ["S0 R+", "R+ S1/3", "R+ S0/3"]


def test_heads_that_three_axes_do_not_divide_are_whole() -> None:
    """12 heads over 2 x 2 x 2: two or one on each device; the projection is cut in multiples of 64."""
    graph, mesh = gpt(), Mesh.parse("a=2,b=2,c=2")
    texts = {"0.qkv": "n/3*64", "0.split": "c*64", "0.attention": "h", "0.swap": "b", "0.join": "c", "0.out": "m*64"}
    texts |= {f"0.{name}{i}": "c" for name in ("view", "swap") for i in range(3)}
    plan = chosen(graph, mesh, {name: " ".join([text] * 3) for name, text in texts.items()})
    assert mismatches(graph, plan) == []
    assert str(plan["0.qkv"].results[0]) == "S2/3 S2/3 S2/3*64"
    assert str(plan["0.view0"].operands[0]) == "S2 S2 S2*64"


def test_sequence_shards_go_through_the_flattening_before_the_loss() -> None:
    graph, mesh = gpt(), Mesh.parse("dp=2,tp=2")
    plan = chosen(graph, mesh, {"head": "i0 i1", "logits": "a b", "rows": "a b", "loss": "rows rows/4"})
    assert mismatches(graph, plan) == []
    assert str(plan["logits"].results[0]) == "S0 S0/4"
    assert str(plan["loss"].results[0]) == "P P"


def test_vocabulary_parallel_ends() -> None:
    graph, mesh = gpt(), Mesh.parse("dp=2,tp=2")
    plan = chosen(
        graph, mesh, {"wte_rows": "i0 vocabulary", "head": "i0 n", "logits": "a c", "loss": "rows vocabulary"}
    )
    assert mismatches(graph, plan) == []
    assert plan["wte_rows"].variant == "vocabulary_parallel_embedding"
    assert str(plan["wte_rows"].results[0]) == "S0 P"
    assert str(plan["loss"].results[0]) == "P R"
    local = localise(graph, op_named(graph, "loss"), plan["loss"], mesh)
    assert local.axes == (("rows", ("dp",)), ("vocabulary", ("tp",)))
    assert dict(local.attributes) == {"size": 50257, "ignore_index": -100, "label_smoothing": 0.0}


def test_granularities_are_few_and_the_same_every_time() -> None:
    mesh = Mesh.parse("a=2,b=2,c=2")
    first, second = (granularities(gpt(2), mesh).by_op for _ in range(2))
    assert first == second
    assert all(len(refinements) <= 3 for entries in first.values() for _, refinements in entries)
    assert first["0.qkv"] == first["1.qkv"]
    assert first["0.up"] == ()


def test_a_graph_is_asked_once_for_each_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, mesh = gpt(2), Mesh.parse("a=2,b=2")
    first = granularities(graph, mesh)
    monkeypatch.setattr(operator_table, "_instance", lambda graph, op: pytest.fail("bound again"))
    assert granularities(graph, Mesh.parse("a=2,b=2")) is first
    other = granularities(graph, Mesh.parse("a=2,b=3"))  # the bound rules serve every mesh
    assert other is not first and other.by_op != first.by_op
    op = op_named(graph, "0.qkv")
    assert operator_table.instance(graph, op) is first.signatures["0.qkv"].instance


def test_an_operator_of_the_same_name_is_another() -> None:
    """Where a rule is tried on a changed operator of the same graph."""
    graph = gpt(1)
    op = op_named(graph, "0.up")
    operator_table.instance(graph, op)
    assert not operator_table.instance(graph, replace(op, target="no.such")).known


MOST_CALLS = 1_000_000  # 0.63 million when this was written


def test_twelve_layers_on_three_axes_take_seconds() -> None:
    """By calls of our own functions, which are the same on every machine."""
    graph, mesh = gpt(12), Mesh.parse("a=2,b=2,c=2")
    calls = [0]

    def count(frame: object, event: str, argument: object) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    total = sum(len(offers) for _, offers in offered(graph, mesh, granularities(graph, mesh)))
    sys.setprofile(None)
    assert total > 10_000
    assert calls[0] < MOST_CALLS


def test_strategies_are_distinct_in_meaning() -> None:
    graph, mesh = gpt(), Mesh.parse("dp=2,tp=3")
    for _, offers in offered(graph, mesh, granularities(graph, mesh)):
        meanings = {(s.operands, s.results, s.variant) for s in offers}
        assert len(meanings) == len(offers) == len({str(s) for s in offers})


def test_an_axis_of_size_one_only_repeats() -> None:
    graph, op = one_op("aten.relu", [(4, 6)], [(4, 6)])
    texts = [str(s) for s in strategies(graph, op, Mesh.parse("a=1,b=2"), granularities(graph, Mesh.parse("a=1,b=2")))]
    assert texts == ["= i0", "= i1", "= =", "= +"]


def test_what_depends_on_no_input_is_repeated() -> None:
    graph, op = one_op("aten.arange", [], [(16,)], start=0, end=16)
    assert [str(s) for s in strategies(graph, op, Mesh.parse("a=2"), granularities(graph, Mesh.parse("a=2")))] == ["="]


def test_what_has_no_rule_is_repeated_and_explained() -> None:
    graph, op = one_op("aten.fft_fft", [(4, 6)], [(4, 6)])
    mesh = Mesh.parse("tp=2")
    grains = granularities(graph, mesh)
    assert [str(s) for s in strategies(graph, op, mesh, grains)] == ["=", "+"]
    assert ("aten.fft_fft", "there is no rule for this operator: every axis repeats it") in explain(
        graph, op, mesh, grains
    )


def test_what_is_left_out_has_a_reason() -> None:
    graph, mesh = gpt(), Mesh.parse("tp=8")
    reasons = dict(explain(graph, op_named(graph, "0.attention"), mesh, granularities(graph, mesh)))
    assert reasons["t"] == "the operator needs all of it"
    assert "some device would hold nothing: 12 units over 8 devices" in reasons["h@tp"]
    assert "nothing: 4 units over 8" in reasons["b@tp"]


def test_an_unknown_strategy_lists_those_there_are() -> None:
    graph, op = one_op("aten.relu", [(4, 6)], [(4, 6)])
    mesh = Mesh.parse("tp=2")
    with pytest.raises(UsageError) as error:
        find(graph, op, mesh, granularities(graph, mesh), "n")
    assert "i0; i1; =; +" in str(error.value)


def test_a_strategy_is_found_by_another_name_of_the_same_layouts() -> None:
    graph, mesh = gpt(), Mesh.parse("tp=2")
    grains = granularities(graph, mesh)
    qkv = op_named(graph, "0.qkv")
    assert find(graph, qkv, mesh, grains, "n/3*64") is find(graph, qkv, mesh, grains, "n/3")


@pytest.mark.parametrize("text", ["dp=2,tp=3", "tp=2", "a=1,b=4", "a=2,b=2"])
def test_a_strategy_by_its_name_is_the_one_that_is_offered(text: str) -> None:
    """Whatever is asked for by itself; what no axis can do, and what is no strategy, is none."""
    graph, mesh = gpt(), Mesh.parse(text)
    grains = granularities(graph, mesh)
    for op, offers in offered(graph, mesh, grains):
        for strategy in offers:
            assert named(graph, op, mesh, grains, str(strategy)) == strategy
        cut = {str(choice) for strategy in offers for choice in strategy.choices}
        for choice in ("n", "m", "b", "h", "c/3", "h*7", "~0"):
            other = named(graph, op, mesh, grains, " ".join([choice] * len(mesh.axes)))
            assert other is None or choice in cut
            if other is not None:
                assert find(graph, op, mesh, grains, str(other)).operands == other.operands
        for no in ("", "= " * 7, "(", "= host"):
            assert named(graph, op, mesh, grains, no) is None


def test_carried_to_other_sizes() -> None:
    full, small, mesh = gpt(), gpt(width=96), Mesh.parse("a=2,b=2,c=2")
    name = op_named(full, "0.qkv")
    refinements = granularities(full, mesh).refinements(name), granularities(small, mesh).refinements(name)
    assert carry("n/3*64 n/3*64 n/3*64", *refinements) == "n/3*8 n/3*8 n/3*8"
    assert carry("i0 = n/3", *refinements) == "i0 = n/3"


def test_sizes_on_a_shard() -> None:
    """Plain integers where nothing cuts; an expression where an axis does; the ordinal of what draws a mask."""
    graph, mesh = gpt(2), Mesh.parse("dp=2,tp=2")
    plan = chosen(graph, mesh, {"0.view0": "= c", "1.split": "a c", "1.attention": "b h"})
    view = localise(graph, op_named(graph, "0.view0"), plan["0.view0"], mesh)
    assert dict(view.attributes)["shape"] == (4, 16, LocalSize(12, (AxisShard("tp"),)), 64)
    split = localise(graph, op_named(graph, "1.split"), plan["1.split"], mesh)
    assert dict(split.attributes)["split_size"] == (LocalSize(768, (AxisShard("tp"),)),) * 3
    attention = localise(graph, op_named(graph, "1.attention"), plan["1.attention"], mesh)
    assert attention.variant == "random_attention"
    assert dict(attention.attributes)["index"] == 2
    assert dict(attention.attributes)["shape"] == (4, 12, 16, 16)
    assert dict(attention.attributes)["layout"] == "S0 S1"


@pytest.mark.parametrize(
    ("target", "operands", "results", "attributes"),
    [
        ("aten.split", [(4, 12)], [(4, 12), (4, 0)], {"split_size": (12, 0), "dim": 1}),
        ("aten.cat", [(4, 12), (4, 0)], [(4, 12)], {"dim": 1}),
        ("aten.reshape", [(4, 0, 3)], [(4, 0)], {"shape": (4, 0)}),
        ("aten.repeat", [(4, 6)], [(4, 0)], {"repeats": (1, 0)}),
        ("aten.glu", [(4, 0)], [(4, 0)], {"dim": 1}),
        ("aten.relu", [(4, 0)], [(4, 0)], {}),
    ],
)
def test_dims_of_no_elements_have_no_blocks(target: str, operands: Any, results: Any, attributes: Any) -> None:
    graph, op = one_op(target, operands, results, **attributes)
    mesh = Mesh.parse("tp=2,dp=2")
    grains = granularities(graph, mesh)
    assert all(blocks and unit for _, refinements in grains.refinements(op) for blocks, unit in refinements)
    assert strategies(graph, op, mesh, grains)
