"""Operators that torch has under two names take the same arguments, and give the same numbers, under both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.graph_capture.passes.canonical import RENAMED
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
