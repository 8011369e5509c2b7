"""Proof cases: tensors made like others."""

from __future__ import annotations

from autoshard.rules.proof.case_words import case, floats

CREATION = [
    case("aten.ones_like", floats((4, 5))),
    case("aten.zeros_like", floats((4, 5))),
    case("aten.full_like", floats((4, 5)), fill_value=2.0),
]
