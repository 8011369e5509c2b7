"""Proof cases: random operators, whose whole is drawn on one device."""

from __future__ import annotations

from autoshard.rules.proof.case_words import case, floats
from autoshard.rules.proof.rule_proof import OpCase, Operand


def _drawn(kind: str, first: float, second: float, dtype: str = "float64") -> OpCase:
    return case("autoshard.random", (), size=(4, 5, 6), kind=kind, first=first, second=second, dtype=dtype)


RANDOM = [
    case("aten.dropout", floats((4, 5, 6)), p=0.3, train=True),
    case("aten.dropout", floats((4, 5, 6)), p=0.3, train=False),
    _drawn("uniform", -1.0, 2.0),
    _drawn("normal", 0.5, 2.0),
    _drawn("exponential", 2.0, 0.0),
    _drawn("bernoulli", 0.3, 0.0),
    _drawn("integers", 2, 9, "int64"),
    case("aten.bernoulli", (Operand((4, 5), gradient=False, unit=True),)),
    *(
        case("aten.multinomial", (Operand((4, 7), gradient=False, unit=True),), num_samples=3, replacement=replacement)
        for replacement in (False, True)
    ),
    case("aten.alpha_dropout", floats((4, 5)), p=0.3, train=True),
    case("aten.feature_dropout", floats((4, 5, 6)), p=0.3, train=True),
    case("aten.feature_alpha_dropout", floats((4, 5, 6, 2)), p=0.3, train=True),
    case("aten.feature_dropout", floats((4, 5, 6)), p=0.3, train=False),
]
