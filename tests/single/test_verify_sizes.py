"""Reduced sizes: smaller, and split in the same way."""

from __future__ import annotations

import pytest

from autoshard.ir.graph import Graph, Op, Tensor
from autoshard.ir.layout import AxisShard, Layout, LocalSize, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Compute, LocalValue, Program, ProgramParameter
from autoshard.verification.sizing.reduced_sizes import (
    changed,
    evenness,
    heads_per_device,
    lost_evenness,
    reduced_arguments,
)

MESH = Mesh.parse("dp=2,tp=4")


def test_arguments() -> None:
    planned = {"n_layer": 12, "batch": 2, "name": "x", "flag": True}
    small = reduced_arguments(planned, {"n_layer": 2, "batch": 16, "flag": False}, {"name": "y"})
    assert small == {"n_layer": 2, "batch": 2, "name": "y", "flag": False}
    assert changed(planned, small) == (("flag", "False", "True"), ("n_layer", "2", "12"), ("name", "y", "x"))
    assert changed(planned, planned) == ()


@pytest.mark.parametrize(
    ("size", "words"), [(8, "evenly"), (7, "unevenly"), (5, "down to nothing"), (3, "down to nothing")]
)
def test_evenness(size: int, words: str) -> None:
    assert evenness(LocalSize(size, (AxisShard("tp"),)), MESH) == words


def graph(vocabulary: int, heads: int) -> Graph:
    tensors = (Tensor("w", (vocabulary, 6), "float32", True), Tensor("q", (2, heads, 3, 4), "float32", True))
    op = Op("attention", "aten.scaled_dot_product_attention", ("q", "q", "q"), (), ("a",), "h.0")
    return Graph("g", (*tensors, Tensor("a", (2, heads, 3, 4), "float32", True)), ("q",), (), (), (op,), ("a",), None)


def program(vocabulary: int, heads: int) -> Program:
    def value(name: str, shape: tuple[int, ...], text: str) -> LocalValue:
        layout = Layout.parse(text)
        return LocalValue(name, name, shape, "float32", layout, local_sizes(shape, layout, MESH), True)

    shape = (vocabulary, 6)
    values = (value("w", shape, "R S0"), value("q", (2, heads, 3, 4), "S0 S1"), value("a", (2, heads, 3, 4), "S0 S1"))
    layout = Layout.parse("R S0")
    parameter = ProgramParameter("w", "head.weight", (), shape, "float32", layout, shape, layout, True)
    attention = Compute("attention", "aten.scaled_dot_product_attention", ("q", "q", "q"), (), ("a",), "h.0", "", "b h")
    return Program(
        "g", MESH, values, ("q",), (parameter,), (), (attention,), ("a",), None, (), (), (), "fp32", "adamw", True
    )  # fmt: skip


def lost(full: tuple[int, int], small: tuple[int, int]) -> list[str]:
    return list(lost_evenness(program(*full), graph(*full), program(*small), graph(*small)))


def test_unevenness_must_stay() -> None:
    assert lost((50257, 12), (97, 12)) == []
    (message,) = lost((50257, 12), (96, 12))
    assert message == "head.weight: dim 0 of length 96 is split evenly, planned 50257 is unevenly"
    messages = lost((50257, 12), (97, 2))
    assert len(messages) == 2 and "input 0: dim 1" in messages[0] and "down to nothing" in messages[1]
    assert "result 0 of aten.scaled_dot_product_attention 0 in h.0" in messages[1]


def test_heads_of_a_device() -> None:
    assert heads_per_device(program(97, 12)) == {(3, 12)}
