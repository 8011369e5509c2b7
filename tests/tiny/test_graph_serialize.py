"""Graphs as JSON: what goes in comes out, the text is the same every time, and a damaged file says what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from autoshard.errors import InvalidFileError, UsageError
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph, Op, Parameter, Saved, Tensor
from tests.tiny.random_graphs import graphs

GRAPH = Graph(
    name="m",
    tensors=(Tensor("x", (2, 3), "float32"), Tensor("w", (4, 3), "float32", True),
             Tensor("y", (2, 4), "float32", True)),
    inputs=("x",),
    parameters=(Parameter("w", "layer.weight", ("head.weight",), init=("normal", 0.0, 0.02)),),
    buffers=(),
    ops=(Op("y", "aten.linear", ("x", "w", None), (("eps", float("-inf")), ("sizes", (1, (2.0, True, None)))), ("y",),
            "layer",             "m.py:3", Saved((0,), (), 8, ((0, 0),))),),
    outputs=("y",),
    loss=None,
    modules=(("", "Model"),),
)  # fmt: skip


@given(graphs())
def test_round_trip(graph: Graph) -> None:
    text = graph_json.dumps(graph)
    read = graph_json.loads(text)
    assert read == graph and graph_json.dumps(read) == text
    assert graph_json.graph_hash(read) == graph_json.graph_hash(graph)


def test_numbers_keep_their_kind() -> None:
    graph = graph_json.loads(graph_json.dumps(GRAPH))
    assert repr(graph) == repr(GRAPH)


def test_text_is_strict_json_with_an_op_a_line() -> None:
    text = graph_json.dumps(GRAPH)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert text.endswith("}\n") and sum('"target"' in line for line in text.splitlines()) == 1


@given(graphs(), graphs())
def test_hash_tells_graphs_apart(a: Graph, b: Graph) -> None:
    assert (graph_json.graph_hash(a) == graph_json.graph_hash(b)) == (a == b or repr(a) == repr(b))


@pytest.mark.parametrize(
    "change", [{"name": "n"}, {"precision": "bf16-mixed"}, {"training": False}, {"source": "other.py:build"}]
)
def test_hash_depends_on_everything(change: dict[str, Any]) -> None:
    assert graph_json.graph_hash(replace(GRAPH, **change)) != graph_json.graph_hash(GRAPH)


def test_hash_is_fixed() -> None:
    assert graph_json.graph_hash(GRAPH) == "7b1eb3bc42d8bb7d2712a1cb31dfcc3f64945bea82e2db29d3286b6e6ed4b0f9"


def test_save_and_load_leave_one_file(tmp_path: Path) -> None:
    path = tmp_path / "m.graph.json"
    graph_json.save(GRAPH, path)
    assert graph_json.load(path) == GRAPH and [p.name for p in tmp_path.iterdir()] == ["m.graph.json"]


def test_save_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken.json").mkdir()
    for path in (tmp_path / "none" / "m.json", tmp_path / "taken.json"):
        with pytest.raises(UsageError, match="can't write"):
            graph_json.save(GRAPH, path)
    assert [p.name for p in tmp_path.iterdir()] == ["taken.json"]


def damaged(**changes: Any) -> str:
    return json.dumps(json.loads(graph_json.dumps(GRAPH)) | changes)


def op_with(**changes: Any) -> str:
    op = json.loads(graph_json.dumps(GRAPH))["ops"][0]
    return damaged(ops=[op | changes])


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "is not JSON"),
        (graph_json.dumps(GRAPH)[:-40], "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "is not an autoshard graph"),
        ("[1]", "is not an autoshard graph"),
        (damaged(kind="autoshard.plan"), "is not an autoshard graph"),
        (damaged(schema_version=99), "schema version 99, this autoshard reads version 2"),
        (damaged(inputs="x"), "graph.inputs is str, expected a list"),
        (damaged(training=1), "graph.training is int, expected bool"),
        (damaged(loss=3), "graph.loss is int, expected str or NoneType"),
        (damaged(extra=1), "graph has an unknown key 'extra'"),
        (damaged(modules=[["a"]]), "graph.modules[0] has 1 entries, expected 2"),
        (op_with(operands=["x", 3]), "graph.ops[0].operands[1] is int"),
        (op_with(saved={}), "graph.ops[0].saved lacks 'aliases'"),
        (op_with(attributes=[["a", {"b": 1}]]), "graph.ops[0].attributes[0][1] is dict"),
        (op_with(operands=["nothing"]), "reads nothing before it is produced"),
        (damaged(outputs=["z"]), "output z has no tensor"),
    ],
)
def test_damaged_file_says_what_and_where(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(InvalidFileError) as caught:
        graph_json.load(path)
    assert "m.json" in str(caught.value) and problem in str(caught.value), caught.value


def test_missing_or_binary_file(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("none.json", "No such file"), ("binary.json", "not a text file"), (".", "directory")):
        with pytest.raises(InvalidFileError, match=reason):
            graph_json.load(tmp_path / name)
