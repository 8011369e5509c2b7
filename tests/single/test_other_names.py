"""Operators that torch has under two names take the same arguments, and give the same numbers, under both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.graph_capture.capture import capture_model
from autoshard.graph_capture.passes.canonical import RENAMED, in_letters
from autoshard.rules.operator_table import has_rule
from autoshard.rules.operators import OPERATORS
from tests.interpreter import run

COPIES = {"clone", "contiguous", "lift_fresh", "lift_fresh_copy", "expand_copy"}  # the target is no copy
NAMES = {alias[5:]: name[5:] for alias, name in RENAMED.items() if alias[5:] not in COPIES}
X, Y = torch.rand(3, 4, dtype=torch.float64) / 2 + 0.1, torch.rand(3, 4, dtype=torch.float64) + 0.1
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "bitwise_and": (X > 0.3, Y > 0.3), "bitwise_or": (X > 0.3, Y > 0.3), "bitwise_xor": (X > 0.3, Y > 0.3),
    "cat": ([X, Y], 1), "vstack": ([X, Y],), "movedim": (X, 0, 1), "clamp": (X, 0.2, 0.4), "outer": (X[0], Y[1]),
    "matmul": (X, Y.T), "softmax": (X, 1), "log_softmax": (X, 0), "logsumexp": (X, [1]),
}  # fmt: skip


def overloads(name: str) -> dict[str, str]:
    """Overload -> its arguments."""
    packet = getattr(torch.ops.aten, name)
    return {one: str(getattr(packet, one)._schema).split("(", 1)[1].replace("*, ", "") for one in packet.overloads()}


@pytest.mark.parametrize("own", NAMES)
def test_both_names_mean_the_same(own: str) -> None:
    name = NAMES[own]
    assert f"aten.{name}" in OPERATORS or name in ("bitwise_and", "bitwise_or", "bitwise_xor")
    theirs = overloads(name).values()
    mine = {one: said for one, said in overloads(own).items() if "Tensor" in said and "out" not in one}
    assert mine and all(said in theirs for one, said in mine.items() if "Dimname" not in said)
    inputs = ARGUMENTS.get(name) or ((X, Y) if "other" in next(iter(theirs)) else (X,))
    assert torch.equal(getattr(torch.ops.aten, own)(*inputs), getattr(torch.ops.aten, name)(*inputs))


REWRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "aten.movedim": lambda x: x.movedim((0, 2), (-1, 0)) + x.movedim(1, -1).movedim(0, 2),
    "aten.numpy_T": lambda x: x.permute(1, 2, 0).T,
    "aten.fliplr": torch.fliplr,
    "aten.flipud": torch.flipud,
    "aten.tile": lambda x: torch.tile(x, (2,)) + torch.tile(x, (1, 1, 2)),
    "aten.hstack": lambda x: torch.hstack([x, x]).sum() + torch.hstack([x[0, 0], x[1, 1]]),
    "aten.vstack": lambda x: torch.vstack([x, x]),
    "aten.column_stack": lambda x: torch.column_stack([x[0], x[1]]),
    "aten.dstack": lambda x: torch.dstack([x, x]),
}


@pytest.mark.parametrize("target", REWRITTEN)
def test_what_others_say_too_is_said_by_them(target: str) -> None:
    class Called(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return REWRITTEN[target](x)

    x = torch.rand(2, 3, 4)
    graph = capture_model(Called(), (x,), training=False)
    assert target not in {op.target for op in graph.ops} and all(has_rule(graph, op) for op in graph.ops)
    output = run(graph, {graph.inputs[0]: x})[graph.outputs[0]]
    assert torch.equal(output, REWRITTEN[target](x))


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a number's power": lambda x, y: x.pow_(-0.5),
    "powers": lambda x, y: x.pow_(y),
    "a power in float64": lambda x, y: x.double().float_power_(3.0).float_power_(y),
    "floored quotients": lambda x, y: x.floor_divide_(y),
    "a floored quotient": lambda x, y: x.floor_divide_(0.3),
    "a power of two": lambda x, y: x.ldexp_(y),
    "a number added": lambda x, y: x.add_(2, alpha=3).mul_(0.5).fmod_(1.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_in_place_is_what_the_operator_returns(name: str) -> None:
    class Called(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return WRITES[name](x.clone(), y)

    x, y = torch.rand(2, 3) + 0.1, torch.rand(2, 3) + 0.1
    graph = capture_model(Called(), (x, y), training=False)
    output = run(graph, dict(zip(graph.inputs, (x, y), strict=True)))[graph.outputs[0]]
    assert torch.equal(output, WRITES[name](x.clone(), y))


def test_a_default_of_what_is_written_in_place_is_kept() -> None:
    class Called(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.empty(2, 3).bernoulli_(0.5) * torch.empty_like(x).bernoulli_()

    graph = capture_model(Called(), (torch.rand(2, 3),), training=False)
    drawn = [dict(op.attributes) for op in graph.ops if op.target == "autoshard.random"]
    assert [(attributes["kind"], attributes["first"]) for attributes in drawn] == [("bernoulli", 0.5)] * 2


def test_a_stack_of_vectors_stays() -> None:
    """It makes them matrices first."""

    class Called(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vstack([x[0], x[1]])

    graph = capture_model(Called(), (torch.rand(2, 3),), training=False)
    assert "aten.vstack" in {op.target for op in graph.ops}


EQUATIONS = [
    ("...qhd,...khd->...hqk", (2, 3, 4, 5, 6), (2, 3, 7, 5, 6)),
    ("...ij,jk->...ik", (2, 3, 4, 5), (5, 6)),
    ("ij,...jk", (4, 5), (2, 5, 6)),
    ("ab , bC", (2, 3), (3, 4)),
    ("b a", (2, 3)),
    ("...i->i", (2, 3, 4)),
    ("...i,i->...", (2, 4), (4,)),
    ("i...,...->i...", (2, 3, 4), (3, 4)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
]


@pytest.mark.parametrize("equation", EQUATIONS, ids=str)
def test_an_equation_in_letters_means_the_same(equation: tuple[Any, ...]) -> None:
    text, *shapes = equation
    spelled = in_letters(text, shapes)
    assert "." not in spelled and "->" in spelled
    operands = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
    assert torch.allclose(torch.einsum(spelled, *operands), torch.einsum(text, *operands), rtol=1e-14)


@pytest.mark.parametrize("equation", ["...i,...i->...", "ij,ij->ij"])
def test_an_equation_that_broadcasts_stays(equation: str) -> None:
    assert in_letters(equation, [(2, 3), (1, 3)]) == equation
