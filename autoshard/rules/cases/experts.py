"""Proof cases: mixtures of experts."""

from __future__ import annotations

from autoshard.rules.cases.describe import case, floats, integers
from autoshard.rules.prove import Operand

EXPERTS = [
    case(
        "autoshard.experts", (*floats((10, 3), (5, 8, 3), (5, 6, 4)), integers((10, 2), 5), Operand((10, 2))),
        experts=5, activation="silu", gated=True,
    ),
    case(
        "autoshard.experts", (*floats((6, 4), (4, 5, 4), (4, 4, 5)), integers((6, 3), 2), Operand((6, 3))),
        experts=4, activation="gelu_tanh", gated=False,
    ),
]  # fmt: skip
