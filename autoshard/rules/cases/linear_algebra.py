"""Proof cases: matrix products and other linear algebra."""

from __future__ import annotations

from autoshard.rules.proof.case_text import case, floats

LINEAR_ALGEBRA = [
    case("aten.linear", floats((4, 5, 6), (7, 6), (7,))),
    case("aten.linear", floats((4, 6), (8, 6), None)),
    case("aten.linear", floats((6,), (4, 6), (4,))),
    case("autoshard.linear_in_out", floats((4, 5, 6), (6, 12), (12,))),
    case("autoshard.float8_linear", floats((4, 5, 6), (7, 6), (7,))),  # in float64 the product is the plain one
    case("autoshard.float8_linear", floats((4, 6), (8, 6), None)),
    case("autoshard.float8_linear_in_out", floats((4, 5, 6), (6, 12), (12,))),
    case("autoshard.float8_linear_in_out", floats((6, 6), (6, 6), (6,))),
    case("aten.outer", floats((4,), (5,))),
    case("aten.matmul", floats((4, 3, 5, 6), (4, 3, 6, 4))),
    case("aten.matmul", floats((4, 1, 5, 6), (3, 6, 4))),
    case("aten.matmul", floats((5, 6), (6,))),
    case("aten.matmul", floats((6,), (4, 6, 5))),
    case("aten.matmul", floats((6,), (6,))),
    case("aten.mm", floats((5, 6), (6, 4))),
    case("aten.mv", floats((5, 6), (6,))),
    case("aten.dot", floats((6,), (6,))),
    case("aten.bmm", floats((4, 5, 6), (4, 6, 3))),
    case("aten.addmm", floats((4,), (5, 6), (6, 4)), beta=1, alpha=1),
    case("aten.addmm", floats((5, 1), (5, 6), (6, 4)), beta=2, alpha=3),
    case("aten.baddbmm", floats((4, 1, 3), (4, 5, 6), (4, 6, 3)), beta=1, alpha=1),
    case("aten.linear", floats((4, 4, 4), (4, 4), (4,))),
    case("autoshard.linear_in_out", floats((6, 6), (6, 6), (6,))),
    case("aten.mm", floats((4, 4), (4, 4))),
    case("aten.bmm", floats((4, 4, 4), (4, 4, 4))),
    case("aten.matmul", floats((4, 4, 4), (4, 4))),
    case("aten.einsum", floats((4, 5, 6), (6, 7)), equation="bsm,mn->bsn"),
]
