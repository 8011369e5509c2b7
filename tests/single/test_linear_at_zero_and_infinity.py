"""What the table calls linear is so where other operands are 0 or infinite, as far as it lets them be: parts of a
partial sum, some of them 0, give parts of the result."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autoshard.ir.graph import Graph, Op
from autoshard.ir.graph import Tensor as Value
from autoshard.rules.algebra.notation import Rule
from autoshard.rules.cases import ALL
from autoshard.rules.operator_table import call as seen_by_rules
from autoshard.rules.operator_table import instance, rule_text
from autoshard.rules.operators import is_random
from autoshard.rules.proof.operator_call import call
from autoshard.rules.proof.rule_proof import OpCase, one_op_graph, random_operands

LINEAR = [
    case for case in ALL
    if (graph := one_op_graph(case)) and instance(graph, graph.ops[0]).rule.linear and not is_random(graph.ops[0])
]  # fmt: skip


def at_ends(x: Tensor, infinite: bool) -> Tensor:
    """Zeros among its numbers, and infinities."""
    flat = x.flatten().clone()
    flat[::3] = 0.0
    if infinite:
        flat[1::5] = math.inf
    return flat.view_as(x)


def results(case: OpCase, operands: list[Tensor | None]) -> list[Tensor]:
    result = call(case.target, operands, dict(case.attributes))
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.target)
def test_parts_that_are_zero(case: OpCase) -> None:
    graph = one_op_graph(case)
    positive = seen_by_rules(graph, graph.ops[0]).positive
    for group in instance(graph, graph.ops[0]).rule.linear:
        whole = [x if x is None or not x.is_floating_point() else x.detach() for x in random_operands(case, 0)]
        whole = [
            at_ends(x, i in group) if x is not None and x.is_floating_point() and i not in positive else x
            for i, x in enumerate(whole)
        ]
        zero = [torch.zeros_like(x) if x is not None and i in group else x for i, x in enumerate(whole)]
        for one, part, other in zip(results(case, whole), results(case, whole), results(case, zero), strict=True):
            if one.is_floating_point():
                torch.testing.assert_close(part + other, one, equal_nan=True, msg=f"{case.target} {group}")


Made = tuple[str, tuple[str, ...], dict[str, object]]  # target, operands, arguments


def graph_of(*ops: Made) -> Graph:
    """`x` and `y` are given; the results are a, b, c, …"""
    body = [Op(name, f"aten.{target}", reads, tuple(arguments.items()), (name,))  # type: ignore[arg-type]
            for name, (target, reads, arguments) in zip("abcdef", ops, strict=False)]  # fmt: skip
    names = ("x", "y", *(op.name for op in body))
    values = tuple(Value(name, (4, 6), "float32") for name in names)
    return Graph("g", values, ("x", "y"), (), (), tuple(body), (body[-1].name,), None)


EPS = ("add", ("a",), {"other": 1e-6})
SQUARE = ("pow", ("y",), {"exponent": 2})


@pytest.mark.parametrize(
    ("ops", "linear"),
    [
        ([("mul", ("x", "y"), {})], {(0,), (1,)}),
        ([("mul", ("x",), {"other": 2.0})], {(0,)}),
        ([("mul", ("x",), {"other": math.inf})], set()),
        ([("div", ("x",), {"other": 2})], {(0,)}),
        ([("div", ("x",), {"other": 0})], set()),
        ([("div", ("x", "y"), {})], set()),
        ([("relu", ("y",), {}), ("div", ("x", "a"), {})], set()),
        ([SQUARE, EPS, ("sqrt", ("b",), {}), ("div", ("x", "c"), {})], {(0,)}),
        ([SQUARE, EPS, ("rsqrt", ("b",), {}), ("mul", ("x", "c"), {})], {(0,), (1,)}),
        ([SQUARE, ("rsqrt", ("a",), {}), ("mul", ("x", "b"), {})], {(1,)}),
        ([("exp", ("y",), {}), ("div", ("x", "a"), {})], set()),  # it may be 0 in the end
        ([("clamp", ("y",), {"min": 1e-8}), ("div", ("x", "a"), {})], {(0,)}),
        ([("clamp", ("y",), {"min": 1e-8, "max": 0.0}), ("div", ("x", "a"), {})], set()),
        ([("log", ("y",), {}), ("mul", ("x", "a"), {})], {(1,)}),
        ([("log", ("y",), {}), ("sigmoid", ("a",), {}), ("mul", ("x", "b"), {})], {(0,), (1,)}),
        ([("reciprocal", ("y",), {}), ("outer", ("x", "a"), {})], {(1,)}),
        ([("full", (), {"fill_value": -math.inf}), ("mul", ("x", "a"), {})], {(1,)}),
        *(([("full", (), {"fill_value": fill}), ("div", ("x", "a"), {})], {(0,)} if fill > 0 else set())
          for fill in (2, 0.0, -1)),
        ([("ones", (), {}), ("div", ("x", "a"), {})], {(0,)}),
    ],
)  # fmt: skip
def test_which_factors_are_finite(ops: list[Made], linear: set[object]) -> None:
    graph = graph_of(*ops)
    assert {*Rule.parse(rule_text(graph, graph.ops[-1])).linear} == linear
