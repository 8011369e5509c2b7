"""The plan as a picture: what it must show of a plan, true to it, as one SVG that prints and stands anywhere."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from autoshard.graph_capture.training.precision import apply_precision
from autoshard.html_report.picture import plan_flow, svg
from autoshard.html_report.picture.flow_layout import placed
from autoshard.html_report.picture.plan_flow import BlockFlow, FlowBox, flows
from autoshard.html_report.picture.plan_picture import _label, _title_lines, plan_svg
from autoshard.html_report.picture.shard_glyph import glyph
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.package import package_files
from autoshard.replay.simulated_plan import SimulatedPlan
from autoshard.text import plan_labels
from autoshard.text.collective_lines import collectives, moved_bytes, stored_paths
from tests.graphs import mlp_graph
from tests.tiny.test_report import built

NAMESPACE = "{http://www.w3.org/2000/svg}"


def drawn(simulated: SimulatedPlan) -> ElementTree.Element:
    return ElementTree.fromstring(plan_svg(simulated.plan, simulated.graph, simulated.hardware))


def test_the_same_plan_gives_the_same_picture() -> None:
    assert package_files.picture_text(built()) == package_files.picture_text(built())


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_every_collective_of_a_distinct_block_is_drawn(seed: int | None) -> None:
    simulated = built(mlp_graph(4, 64, 128), seed=seed)
    block_flows = flows(simulated.plan, simulated.graph)
    boxes = [box for flow in block_flows for box in flow.boxes]
    said_of = [(box.what, box.words, *(talk for tensor in box.tensors for talk in tensor.talks)) for box in boxes]
    talks = " ".join(" ".join(words) for words in said_of)
    said = " ".join("".join(node.itertext()) for node in drawn(simulated).iter(f"{NAMESPACE}text"))
    for move in simulated.plan.redistributions:
        words = collectives(move, simulated.plan, simulated.graph)
        if words and move.consumers[0] in simulated.graph.by_op:
            assert words.partition(" over")[0] in talks
            assert words.partition(" over")[0].split()[0] in said
    assert sum(flow.times for flow in block_flows) >= 4 or any("…" in flow.title for flow in block_flows)
    assert "dp: groups of 2 over NVLink" in said and "tp: groups of 2 over NVLink" in said


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_bytes_and_buckets_of_moves_are_those_of_the_simulated_step(seed: int | None) -> None:
    simulated = built(mlp_graph(4, 64, 128), seed=seed)
    graph = simulated.graph
    moves = {move: collectives(move, simulated.plan, graph) for move in simulated.plan.redistributions}
    paths = stored_paths(graph)
    bucketed = {path for bucket in simulated.program.gradient_buckets for path in bucket.parameters}
    assert {paths[move.tensor] for move, words in moves.items() if "in gradient buckets" in words} == bucketed
    alone = [move for move, words in moves.items() if words and move.tensor not in paths]
    sizes = {event.bytes for event in simulated.timeline.events if event.collective}
    assert {moved_bytes(move, graph, simulated.plan.mesh) for move in alone} <= sizes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_only_what_communicates_moves_bytes(seed: int, training: bool) -> None:
    """A slice, a mask and, in a forward alone, the way of a gradient move nothing."""
    graph = mlp_graph(4, 64, 128)
    simulated = built(graph if training else replace(graph, loss=None, training=False), seed=seed)
    for move in simulated.plan.redistributions:
        said = collectives(move, simulated.plan, simulated.graph)
        assert bool(said) == (moved_bytes(move, simulated.graph, simulated.plan.mesh) > 0), (move, said)


def test_edges_join_boxes_that_are_there() -> None:
    for seed in (None, 1, 2):
        simulated = built(seed=seed)
        for flow in flows(simulated.plan, simulated.graph):
            keys = {box.key for box in flow.boxes}
            assert {key for edge in flow.edges for key in edge} == keys
            assert len({box.key for box in flow.boxes}) == len(flow.boxes)


def test_a_residual_is_a_second_way_into_its_sum() -> None:
    boxes = tuple(FlowBox(key, "op") for key in ("x", "norm", "up", "add"))
    flow = BlockFlow("h", 1, boxes, (("x", "norm"), ("norm", "up"), ("up", "add"), ("x", "add")))
    placed_flow = placed(flow, {box.key: (100.0, 30.0) for box in boxes})
    tops = [placed_flow.places[key].y for key in ("x", "norm", "up", "add")]
    assert tops == sorted(tops) and len(set(tops)) == 4
    [lane] = placed_flow.lanes
    assert lane.x > max(place.x + place.width for place in placed_flow.places.values())
    assert lane.start[1] == tops[0] + 30 and lane.end[1] == tops[3]
    assert len(placed_flow.straight) == 3


def test_boxes_never_overlap() -> None:
    for seed in (None, 1, 2, 3):
        simulated = built(mlp_graph(3, 64, 128), seed=seed)
        for flow in flows(simulated.plan, simulated.graph):
            places = list(placed(flow, {box.key: (120.0, 40.0) for box in flow.boxes}).places.values())
            for one in places:
                for other in places:
                    apart = one.x + one.width <= other.x or other.x + other.width <= one.x
                    assert one is other or apart or one.y + one.height <= other.y or other.y + other.height <= one.y


def test_mixed_precision_hides_no_weight() -> None:
    """A weight's cast is no box and no row: its product has the box, with the stored layout and what moves for it."""
    simulated = built(apply_precision(mlp_graph(4, 64, 128), "bf16-mixed"), seed=1)
    boxes = [box for flow in flows(simulated.plan, simulated.graph) for box in flow.boxes if box.kind == "op"]
    products = [box for box in boxes if box.what == "linear"]
    assert products and all(box.tensors[0].name == "weight, bias" for box in products)
    stored = {parameter.name: parameter.layout for parameter in simulated.plan.parameters}
    assert {box.tensors[0].layout for box in products} <= set(stored.values())
    rows = [row for block in plan_labels.blocks(simulated.plan, simulated.graph) for row in block.rows]
    shown = [
        row
        for block in plan_labels.blocks(simulated.plan, simulated.graph)
        for row in plan_labels.without_casts(block.rows, simulated.graph)
    ]
    assert any(row.op.target == "aten.to" and row.op.operands[0] in simulated.graph.weights for row in rows)
    assert not any(row.op.target == "aten.to" and row.op.operands[0] in simulated.graph.weights for row in shown)
    assert sorted(map(repr, (m for row in shown for m in row.moves))) == sorted(
        map(repr, (m for row in rows for m in row.moves))
    )


def test_a_long_picture_joins_what_is_split_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = built(mlp_graph(4, 64, 128), "dp=4")
    long = [box.what for flow in flows(simulated.plan, simulated.graph) for box in flow.boxes]
    monkeypatch.setattr(plan_flow, "MOST_BOXES", 2)
    short = [box for flow in flows(simulated.plan, simulated.graph) for box in flow.boxes]
    assert len(short) < len(long) and any("relu" in box.after for box in short)


def test_edges_pass_beside_higher_boxes() -> None:
    """Down to the end of the layer first: a low box beside high ones is left without crossing them."""
    boxes = tuple(FlowBox(key, "op") for key in ("low", "high", "next", "last"))
    flow = BlockFlow("h", 1, boxes, (("low", "next"), ("high", "next"), ("next", "last"), ("low", "last")))
    heights = {"low": 18.0, "high": 90.0, "next": 30.0, "last": 30.0}
    placed_flow = placed(flow, {key: (100.0, height) for key, height in heights.items()})
    low, high = placed_flow.places["low"], placed_flow.places["high"]
    assert low.floor == high.y + 90.0 < placed_flow.places["next"].y
    [lane] = placed_flow.lanes
    assert low.floor < lane.turn < placed_flow.places["next"].y


def test_a_module_keeps_its_own_name() -> None:
    box = FlowBox("a", "op", "decoder.layer.0.SelfAttention", "scaled_dot_product_attention")
    assert _title_lines(box) == ["decoder.layer.0.SelfAttention", "scaled_dot_product_attention"]
    assert _title_lines(FlowBox("a", "op", "decoder.layer.1.DenseReluDense.wi", "linear")) == [
        "…1.DenseReluDense.wi · linear"
    ]
    assert _title_lines(FlowBox("a", "move", "", "all-reduce over dp+tp in backward")) == [
        "all-reduce over dp+tp in",
        "backward",
    ]
    assert _label("from encoder.block.0.layer.0.SelfAttention", 170.0) == "from …layer.0.SelfAttention"


GLYPHS = [
    ("S0 R", 1, 1, 0),  # one cut by dp, one copy behind it for tp
    ("S0 S0", 3, 0, 0),  # four parts on one dim
    ("S0 S1", 2, 0, 0),  # rows and columns
    ("P R", 0, 1, 1),
    ("R R", 0, 2, 0),
]


@pytest.mark.parametrize(("layout", "cuts", "copies", "sums"), GLYPHS)
def test_a_tensor_on_the_mesh(layout: str, cuts: int, copies: int, sums: int) -> None:
    parts = glyph(0, 0, Layout.parse(layout), Mesh((("dp", 2), ("tp", 2))))
    assert sum(part.startswith("<line") for part in parts) == cuts
    assert sum(part.startswith("<rect") for part in parts) == copies + 2
    assert sum("Σ" in part for part in parts) == sums


def test_the_outer_axis_cuts_in_the_middle() -> None:
    """dp cuts first: its line is the middle one of three, tp's are beside it."""
    parts = [part for part in glyph(0, 0, Layout.parse("S0 S0"), Mesh((("dp", 2), ("tp", 2)))) if "<line" in part]
    assert ["axis0" in part for part in parts] == [False, True, False]


def test_hostile_names_stay_text() -> None:
    graph = mlp_graph(1)
    evil = "</svg><script>alert(1)</script>\u202e\"'&"
    simulated = built(replace(graph, ops=tuple(replace(op, module=evil) for op in graph.ops), modules=()))
    text = package_files.picture_text(simulated)
    assert "<script" not in text and "\u202e" not in text
    assert any("<script>" in "".join(node.itertext()) for node in ElementTree.fromstring(text).iter())


@pytest.mark.parametrize("words", ["plain", "a\tb\nc\rd", '"both\' kinds"', "<&>", "'one'"])
def test_an_attribute_is_read_as_it_was_written(words: str) -> None:
    assert ElementTree.fromstring(svg.text(0, 0, "x", title=words)).get("title") == words


def test_what_does_not_fit_is_cut_at_the_end_that_says_less() -> None:
    assert svg.clipped("all-gather", 200) == "all-gather"
    assert svg.clipped("a" * 100, 100).endswith("…") and svg.width_of(svg.clipped("a" * 100, 100)) <= 100
    assert svg.ending("model.layers.0.mlp.down_proj", 100).endswith("down_proj")
    assert svg.width_of(svg.ending("model.layers.0.mlp.down_proj", 100)) <= 100
    assert svg.width_of("層" * 10) == 2 * svg.width_of("a" * 10)


def test_a_large_mesh_is_drawn_small() -> None:
    simulated = built(mlp_graph(2, 64, 128), "pp=4,dp=4,tp=8")
    text = package_files.picture_text(simulated)
    assert len(text) < 60_000 and "and 13 nodes more" in text
