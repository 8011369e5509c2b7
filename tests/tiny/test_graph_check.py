"""Every invariant of a Graph can fail, and says which op or tensor broke it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from autoshard.ir.graph import (
    ColumnRanges,
    Graph,
    GraphFault,
    InputRange,
    Op,
    Parameter,
    Recipe,
    RecipeCall,
    Saved,
    Tensor,
)
from autoshard.ir.graph_check import check
from tests.tiny.random_graphs import graphs

GRAPH = Graph(
    name="m",
    tensors=(Tensor("x", (2,), "float32"), Tensor("w", (2,), "float32", True), Tensor("s", (2,), "float32"),
             Tensor("y", (2,), "float32", True), Tensor("loss", (), "float32", True)),
    inputs=("x",),
    parameters=(Parameter("w", "w"),),
    buffers=(Parameter("s", "s"),),
    ops=(Op("mul", "aten.mul", ("x", "w"), (), ("y",), saved=Saved((0,))),
         Op("sum", "aten.sum", ("y",), (), ("loss",))),
    outputs=("loss",),
    loss="loss",
    buffer_updates=(("s", "y"),),
)  # fmt: skip


def with_op(**changes: Any) -> Graph:
    return replace(GRAPH, ops=(replace(GRAPH.ops[0], **changes), *GRAPH.ops[1:]))


def with_tensor(**changes: Any) -> Graph:
    return replace(GRAPH, tensors=(replace(GRAPH.tensors[0], **changes), *GRAPH.tensors[1:]))


def with_call(target: str, *arguments: Any, **keywords: Any) -> Graph:
    return replace(GRAPH, recipes=(Recipe(("w",), (RecipeCall(target, arguments, tuple(keywords.items())),)),))


def with_argument(text: str) -> Graph:
    return replace(GRAPH, schemas=(f"aten::mul.Tensor(Tensor self, {text}) -> Tensor",))


def test_a_sound_graph() -> None:
    check(GRAPH)


@given(graphs())
def test_random_graphs_are_sound(graph: Graph) -> None:
    check(graph)


@pytest.mark.parametrize(
    "graph, words",
    [
        (replace(GRAPH, ops=GRAPH.ops[::-1]), "op sum (aten.sum) reads y before it is produced"),
        (with_op(operands=("x", "q")), "reads q before it is produced"),
        (replace(GRAPH, input_ranges=(InputRange("x", 0.0, float("inf")),)), "the numbers of input x are in no range"),
        (replace(GRAPH, column_ranges=(ColumnRanges("x", ()),)), "the numbers of input x are in no range: ()"),
        (replace(GRAPH, column_ranges=(ColumnRanges("x", ((0.0, 2.0), (3.0, 3.0))),)), "are in no range: ((0.0, 2.0)"),
        (with_op(results=("q",)), "makes q, which has no tensor"),
        (with_op(results=("x",)), "makes x a second time"),
        (with_op(name="sum"), "op sum appears twice"),
        (with_op(attributes=(("a", 1), ("a", 2))), "op mul (aten.mul) attribute a appears twice"),
        (with_op(saved=Saved((2,))), "saves operand (2,) of 2"),
        (with_op(saved=Saved((), (1,))), "saves result (1,) of 1"),
        (with_op(saved=Saved(aliases=((0, 5),))), "saves operand [5] of 2"),
        (with_op(operands=(None, "w")), "saves an operand that is not given"),
        (with_op(saved=Saved(extra_bytes=-1)), "saves -1 bytes"),
        (with_tensor(dtype="complex64"), "unknown dtype 'complex64'"),
        (with_tensor(shape=(-1,)), "negative size"),
        (with_tensor(dtype="int64", requires_grad=True), "can't require a gradient"),
        (with_tensor(name="w"), "tensor w appears twice"),
        (replace(GRAPH, inputs=("q",)), "q has no tensor"),
        (replace(GRAPH, inputs=("x", "w")), "parameter or buffer w appears twice"),
        (replace(GRAPH, inputs=()), "reads x before"),
        (replace(GRAPH, parameters=(Parameter("w", "w", ("s",)),)), "path s appears twice"),
        (
            replace(GRAPH, tensors=(*GRAPH.tensors, Tensor("q", (), "int64"))),
            "tensor q is neither stored, given nor produced",
        ),
        (replace(GRAPH, outputs=("q",)), "output q has no tensor"),
        (replace(GRAPH, loss="q"), "the loss q has no tensor"),
        (replace(GRAPH, loss="y"), "not a scalar"),
        (replace(GRAPH, buffer_updates=(("w", "y"),)), "w is updated but is no buffer"),
        (replace(GRAPH, buffer_updates=(("s", "q"),)), "gets q, which has no tensor"),
        (replace(GRAPH, buffer_updates=(("s", "loss"),)), "of another shape or dtype"),
        # what becomes code
        (with_op(target="load_library.__call__"), "not namespace.name"),
        (with_op(target="import_module.__call__"), "not namespace.name"),
        (with_op(target="__class__.mul"), "not namespace.name"),
        (with_op(target="aten.mul.__globals__"), "not namespace.name"),
        (with_call("os.system", "ls"), "call 0 of the recipe of w is 'os.system'"),
        (with_call("aten.zeros.default", (2,), **{"a=b": 1}), "has the keyword 'a=b'"),
        (with_call("aten.zeros.default", "open(1)"), "has 'open(1)'"),
        (with_call("aten.neg.default", "%0"), "takes %0, which is not there yet"),
        (with_call("values", "torch.int64", (1,), ("x",)), "call 0 of the recipe of w: numbers"),
        (with_call("packed", "torch.int64", 1, "eJw="), "call 0 of the recipe of w: shape"),
        (with_call("values"), "call 0 of the recipe of w: dtype"),
        (replace(GRAPH, recipes=(Recipe(("w",), ()),)), "the recipe of w is empty"),
        (replace(GRAPH, recipes=(Recipe(("q",), ()),)), "not all of the model"),
        (with_argument('Tensor "a"!'), "has more than names"),
        (with_argument("Tensor x[y]"), "has more than names"),
        (replace(GRAPH, schemas=("aten::mul",)), "no schema"),
        (replace(GRAPH, schemas=("load_library::__call__(str path) -> Tensor",)), "has more than names"),
    ],
)
def test_a_broken_invariant_is_named(graph: Graph, words: str) -> None:
    with pytest.raises(GraphFault) as caught:
        check(graph)
    assert words in str(caught.value), caught.value
