"""Proof cases: mixtures of experts."""

from __future__ import annotations

from autoshard.rules.proof.case_words import case, floats, integers
from autoshard.rules.proof.rule_proof import Operand

EXPERTS = [
    case(
        "autoshard.experts", (*floats((10, 3), (5, 8, 3), (5, 6, 4)), integers((10, 2), 5), Operand((10, 2))),
        experts=5, activation="silu", gated=True,
    ),
    case(
        "autoshard.experts", (*floats((6, 4), (4, 5, 4), (4, 4, 5)), integers((6, 3), 2), Operand((6, 3))),
        experts=4, activation="gelu_tanh", gated=False,
    ),
    case(
        "autoshard.experts", (*floats((4, 4), (4, 6, 4), (4, 4, 6)), integers((4, 2), 4), Operand((4, 2))),
        experts=4, activation="relu2", gated=False,
    ),
    case(
        "autoshard.experts",
        (*floats((6, 3), (5, 3, 8), (5, 4, 2)), integers((6, 2), 5), *floats((6, 2), (5, 8), (5, 2))),
        experts=5, activation="clipped", gated=True, limit=1.0, alpha=1.7,
    ),
]  # fmt: skip
