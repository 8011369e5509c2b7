"""Proof cases: writes at given places."""

from __future__ import annotations

from autoshard.rules.cases.indexing import ONE_A_ROW
from autoshard.rules.proof.case_words import booleans, case, integers
from autoshard.rules.proof.rule_proof import Operand

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
