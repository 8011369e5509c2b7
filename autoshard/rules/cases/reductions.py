"""Proof cases: reductions, sorts and cumulative sums."""

from __future__ import annotations

from autoshard.rules.proof.case_text import booleans, case, floats, integers, positive

REDUCTIONS = [
    case("aten.sum", floats((4, 5, 6)), dim=(1,), keepdim=False, dtype=None),
    case("aten.sum", floats((4, 5, 6)), dim=(0, -1), keepdim=True, dtype=None),
    case("aten.sum", floats((4, 5)), dtype=None),
    case("aten.sum", (integers((4, 5), 9),), dim=(1,), keepdim=False, dtype=None),
    case("aten.mean", floats((4, 5, 6)), dim=(1,), keepdim=False, dtype=None),
    case("aten.mean", floats((4, 5, 6)), dim=(-2, 0), keepdim=True, dtype=None),
    case("aten.mean", floats((4, 5)), dtype=None),
    case("aten.amax", floats((4, 5)), dim=(1,), keepdim=False),
    case("aten.max", floats((4, 5)), dim=1, keepdim=False),
    case("aten.min", floats((4, 5)), dim=0, keepdim=True),
    case("aten.max", floats((4, 5))),
    case("aten.amin", floats((4, 5, 6)), dim=(0, 2), keepdim=True),
    case("aten.argmin", floats((4, 5)), dim=0, keepdim=False),
    case("aten.argsort", floats((4, 5)), dim=0, descending=True),
    case("aten.all", (booleans((4, 5)),), dim=0, keepdim=True),
    case("aten.prod", floats((4, 5)), dim=1, keepdim=False, dtype=None),
    case("aten.std", floats((4, 5, 6)), dim=(1,), correction=1, keepdim=False),
    case("aten.norm", floats((4, 5, 6)), p=2, dim=(1,), keepdim=True),
    case("aten.linalg_vector_norm", floats((4, 5)), ord=2, dim=(-1,), keepdim=True, dtype=None),
    case("aten.cummax", floats((4, 5)), dim=1),
    case("aten.logcumsumexp", floats((4, 5)), dim=0),
    case("aten.triu", floats((4, 5, 6)), diagonal=1),
    case("aten.argmax", floats((4, 5)), dim=1, keepdim=True),
    case("aten.logsumexp", floats((4, 5)), dim=(1,), keepdim=False),
    case("aten.var", floats((4, 5, 6)), dim=(2,), correction=1, keepdim=True),
    case("aten.cumsum", floats((4, 5)), dim=1, dtype=None),
    case("aten.cumprod", positive((4, 5)), dim=0, dtype=None),
    case("aten.topk", floats((4, 5)), k=2, dim=-1, largest=True, sorted=True),
    case("aten.sort", floats((4, 5)), dim=-1, descending=False),
    case("aten.diff", (integers((4, 5), 9), integers((4, 1), 9), None), n=1, dim=-1),
    case("aten.tril", floats((4, 5, 6)), diagonal=0),
    case("aten.any", (booleans((4, 5)),), dim=1, keepdim=False),
]
