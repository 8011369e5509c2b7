"""Proof cases: tensors made like others, drawn at random, or written in parts."""

from __future__ import annotations

from autoshard.rules.cases.indexing import ONE_A_ROW
from autoshard.rules.proof.case_text import booleans, case, floats, integers
from autoshard.rules.proof.rule_proof import OpCase, Operand

CREATION = [
    case("aten.ones_like", floats((4, 5))),
    case("aten.zeros_like", floats((4, 5))),
    case("aten.full_like", floats((4, 5)), fill_value=2.0),
]


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


WRITES = [
    case("aten.index_put", (Operand((7, 6)), integers((2, 2), 7), Operand((2, 2, 6))), accumulate=True),
    case("aten.index_put", (Operand((7, 6)), integers((1,), 7), Operand((6,))), accumulate=False),
    case("aten.index_put", (Operand((5, 7, 6)), None, integers((4,), 7), Operand((5, 4, 6))), accumulate=True),
    case(
        "aten.index_put", (Operand((5, 7, 6)), integers((4,), 5), integers((4,), 7), Operand((4, 6))), accumulate=True
    ),
    case("aten.index_put", (Operand((5, 7)), integers((4,), 5), integers((4,), 7), Operand(())), accumulate=False),
    case("aten.index_put", (Operand((5, 6)), booleans((5, 6)), Operand((), gradient=False)), accumulate=False),
    case("aten.index_copy", (Operand((4, 7)), integers((1,), 7), Operand((4, 1))), dim=1),
    case("aten.index_fill", (Operand((4, 7)), integers((3,), 7)), dim=1, value=2.0),
    case("aten.scatter_reduce", (Operand((4, 7)), ONE_A_ROW, Operand((4, 1))), dim=1, reduce="sum", include_self=True),
    case("aten.scatter_reduce", (Operand((4, 7)), integers((4, 6), 7), Operand((4, 6))), dim=1, reduce="amax"),
    case("aten.one_hot", (integers((4, 5), 7),), num_classes=7),
    case("aten.bucketize", (Operand((4, 5)), Operand((6,), gradient=False)), right=True),
]
