"""Proof cases: views and look-ups."""

from __future__ import annotations

from autoshard.rules.cases.describe import case, floats, integers
from autoshard.rules.proof.rule_proof import Operand

VIEWS = [
    case("aten.reshape", floats((4, 5, 6)), shape=(4, 5, 3, 2)),
    case("aten.reshape", floats((4, 5, 6)), shape=(20, 6)),
    case("aten.reshape", floats((4, 6)), shape=(2, 12)),
    case("aten.reshape", floats((6, 4)), shape=(4, 6)),
    case("aten.reshape", floats((4, 1, 6)), shape=(1, 4, 2, 1, 3)),
    case("aten.reshape", floats((4, 10, 6)), shape=(4, 5, 2, 6)),
    case("aten.reshape", floats((2, 6, 6)), shape=(72,)),
    case("aten._unsafe_view", floats((4, 6)), size=(4, 3, 2)),
    case("aten.broadcast_to", floats((4, 1)), size=(3, 4, 5)),
    case("aten.swapaxes", floats((4, 5, 6)), axis0=0, axis1=-1),
    case("aten.mT", floats((4, 5, 6))),
    case("aten.concat", floats((4, 6), (4, 6)), dim=1),
    case("aten.narrow", floats((4, 6)), dim=1, start=1, length=4),
    case("aten.constant_pad_nd", floats((4, 6)), pad=(0, 1), value=0),
    case("aten.view", floats((4, 6)), size=(24,)),
    case("aten.flatten", floats((4, 5, 6)), start_dim=1, end_dim=-1),
    case("aten.unflatten", floats((4, 6)), dim=-1, sizes=(3, 2)),
    case("aten.squeeze", floats((4, 1, 6)), dim=1),
    case("aten.unsqueeze", floats((4, 6)), dim=-1),
    case("aten.expand", floats((4, 1, 6)), size=(4, 5, -1), implicit=False),
    case("aten.expand", floats((1, 6)), size=(3, 4, 6), implicit=False),
    case("aten.permute", floats((4, 5, 6)), dims=(2, 0, 1)),
    case("aten.transpose", floats((4, 5, 6)), dim0=-1, dim1=1),
    case("aten.permute", floats((4, 4, 4)), dims=(2, 0, 1)),
    case("aten.transpose", floats((4, 4)), dim0=0, dim1=1),
    case("aten.t", floats((4, 5))),
    case("aten.split", floats((4, 12)), split_size=4, dim=-1),
    case("aten.split", floats((10, 4)), split_size=4, dim=0),
    case("aten.split_with_sizes", floats((4, 16)), split_sizes=(8, 4, 4), dim=1),
    case("aten.split_with_sizes", floats((4, 7)), split_sizes=(4, 3), dim=1),
    case("aten.chunk", floats((4, 12)), chunks=2, dim=1),
    case("aten.cat", floats((4, 6), (4, 6)), dim=1),
    case("aten.cat", floats((6, 4), (3, 4)), dim=0),
    case("aten.cat", floats((4, 6), (4, 0)), dim=1),
    case("aten.stack", floats((4, 5), (4, 5)), dim=1),
    case("aten.unbind", floats((4, 3, 5)), dim=1),
    case("aten.select", floats((4, 5, 6)), dim=1, index=2),
    case("aten.slice", floats((4, 6)), dim=1, start=1, end=5, step=2),
    case("aten.slice", floats((4, 6)), dim=0, start=0, end=2**60, step=1),
    case("aten.slice", floats((4, 6)), dim=1, start=6, end=6, step=1),
    case("aten.pad", floats((4, 6)), pad=(0, 1), mode="constant", value=None),
    case("aten.pad", floats((4, 6)), pad=(1, -1), mode="constant", value=2.0),
    case("aten.flip", floats((4, 5)), dims=(1,)),
    case("aten.roll", floats((4, 6)), shifts=(2,), dims=(0,)),
    case("aten.repeat", floats((4, 5)), repeats=(3, 1, 2)),
    case("aten.repeat_interleave", floats((4, 6)), repeats=2, dim=1, output_size=12),
    case("aten.glu", floats((4, 6)), dim=-1),
]
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
