"""Operators that torch has under two names take the same arguments, and give the same numbers, under both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.graph_capture.passes.canonical import RENAMED, in_letters
from autoshard.rules.operators import OPERATORS

COPIES = {"clone", "contiguous", "lift_fresh", "lift_fresh_copy", "expand_copy"}  # the target is no copy
NAMES = {own[5:]: name[5:] for own, name in RENAMED.items() if own[5:] not in COPIES}
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
    given = ARGUMENTS.get(name) or ((X, Y) if "other" in next(iter(theirs)) else (X,))
    assert torch.equal(getattr(torch.ops.aten, own)(*given), getattr(torch.ops.aten, name)(*given))


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
