"""Proof cases: look-ups and scatters."""

from __future__ import annotations

from autoshard.rules.proof.case_text import case, floats, integers
from autoshard.rules.proof.rule_proof import Operand

_EMPTY = Operand((4,), "int64", 0, 1)  # offsets of zero: every bag but the last is empty
BAGS = [
    case("autoshard.embedding_bags", (Operand(table), ids, offsets, weights), mode=mode, padding_idx=padding)
    for table, ids, offsets, weights, mode, padding in (
        ((7, 4), integers((6, 5), 7), None, None, "sum", None),
        ((7, 4), integers((6, 5), 7), None, None, "mean", 3),
        ((7, 4), integers((6, 5), 7), None, Operand((6, 5)), "sum", 0),
        ((8, 6), integers((4, 5), 8), None, None, "max", 2),
        ((7, 4), integers((9,), 7), _EMPTY, None, "mean", None),
        ((2, 3), integers((9,), 2), _EMPTY, Operand((9,)), "sum", 1),
        ((7, 4), integers((9,), 7), _EMPTY, None, "max", None),
    )
]
ONE_A_ROW = integers((4, 1), 7)  # one entry a row: which of several would win is not defined
INDEXING = [
    case(
        "aten.embedding", (Operand((7, 4)), integers((4, 5), 7)), padding_idx=-1, scale_grad_by_freq=False, sparse=False
    ),
    case(
        "aten.embedding", (Operand((7, 4)), integers((4, 5), 7)), padding_idx=3, scale_grad_by_freq=False, sparse=False
    ),
    case(
        "aten.embedding", (Operand((7, 4)), integers((4, 5), 7)), padding_idx=-1, scale_grad_by_freq=True, sparse=False
    ),
    case("aten.gather", (Operand((4, 7)), integers((4, 5), 7)), dim=1, sparse_grad=False),
    case("aten.gather", (Operand((4, 7)), integers((3, 7), 4)), dim=0, sparse_grad=False),
    case("aten.index_select", (Operand((4, 7)), integers((5,), 7)), dim=1),
    case("aten.index", (Operand((7, 6)), integers((4, 5), 7))),
    case("aten.index", (Operand((4, 7, 6)), None, integers((5,), 7))),
    case("aten.index", (integers((4, 6), 9), integers((4, 1, 1, 1), 4), integers((1, 1, 6, 1), 6))),
    case("aten.index", (Operand((4, 7, 6)), integers((5,), 4), None, integers((5,), 6))),
    case("aten.index_add", (Operand((7, 4)), integers((6,), 7), Operand((6, 4))), dim=0, alpha=2),
    case("aten.index_add", (Operand((4, 7)), integers((5,), 7), Operand((4, 5))), dim=-1, alpha=1),
    # indices as long as the dim that they index, and longer: it is not cut with them
    case("aten.gather", (Operand((4, 7)), integers((4, 7), 7)), dim=1, sparse_grad=False),
    case("aten.gather", (Operand((4, 7)), integers((3, 9), 7)), dim=-1, sparse_grad=False),
    case("aten.index_select", (Operand((4, 7)), integers((7,), 7)), dim=1),
    case("aten.index_add", (Operand((4, 7)), integers((7,), 7), Operand((4, 7))), dim=1, alpha=1),
    case("aten.scatter_add", (Operand((4, 7)), integers((4, 7), 7), Operand((4, 7))), dim=1),
    case("aten.scatter", (Operand((4, 7)), ONE_A_ROW, Operand((4, 1))), dim=-1),
    case("aten.scatter", (Operand((4, 7, 5)), integers((4, 1, 5), 7)), dim=1, value=1.0),
    case("aten.scatter", (Operand((4, 7, 5)), integers((3, 1, 5), 7)), dim=1, value=1.0),
    case("aten.scatter_add", (Operand((4, 7)), integers((4, 6), 7), Operand((4, 6))), dim=1),
    case("aten.scatter_add", (Operand((4, 7, 6)), integers((3, 9, 6), 7), Operand((3, 9, 6))), dim=1),
    case("aten.select_scatter", floats((4, 5, 6), (4, 6)), dim=1, index=2),
    case("aten.slice_scatter", floats((4, 5, 6), (4, 2, 6)), dim=1, start=1, end=5, step=2),
    case("aten.slice_scatter", floats((4, 6), (4, 6)), dim=-1, start=0, end=2**60, step=1),
    *BAGS,
]
