"""Operators cut as the original interface cuts them: no more elements reach a rank than there.

The original's operators with given cuts insert known collectives; the bounds here are those, in elements that a rank
receives (a ring's all-reduce over n: 2 (n - 1) / n of the tensor; a reduce-scatter half of that). What it only slices
is free. Counted while the written package runs forward, so that what happens inside variants counts too.

Where the original refuses, and this does not: cuts of 3 and other numbers that are no power of two (on meshes that have
such axes), dims that the cuts do not divide (the last devices hold less), weights whose stored shards are uneven.
Not expressible here: tables whose rows are split unevenly by hand (`manual_split`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.case import check_files, make_case
from autoshard.verification.ranks import lockstep
from autoshard.verification.ranks.lockstep import ThreadTransport
from tests.slow import quick_at


class Operators(nn.Module):
    def __init__(self, kind: str, rows: int, columns: int) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("matmul", "table"):
            self.w = nn.Parameter(torch.randn(rows, columns))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.kind == "matmul":
            return (x @ self.w).relu()
        if self.kind == "table":
            return F.embedding(y, self.w).relu()
        if self.kind == "batched":
            return torch.matmul(x, y)
        if self.kind == "reshape":
            return x.relu().reshape(*y.shape).exp()
        return x.relu()


def build(kind: str, x: str, y: str = "1", rows: int = 64, columns: int = 64) -> tuple[nn.Module, tuple[Tensor, ...]]:
    first, second = ([int(n) for n in text.split("x")] for text in (x, y))
    other = torch.randint(0, rows, second) if kind == "table" else torch.randn(second)
    return Operators(kind, rows, columns), (torch.randn(first), other)


class _Counting(ThreadTransport):
    """Counts the elements that each rank, which is a thread, receives."""

    received: ClassVar[Counter[threading.Thread]] = Counter()

    def _add(self, count: float) -> None:
        self.received[threading.current_thread()] += round(count)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Any:
        size = len(self.group.ranks)
        self._add(2 * (size - 1) / size * x.numel())
        return super().all_reduce(x, op)

    def all_gather(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        result = super().all_gather(x, lengths)
        self._add(result.numel() - x.numel())
        return result

    def start_all_gather(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        gathered = self.all_gather(x, lengths)
        return lambda: gathered

    def start_reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        reduced = self.reduce_scatter(x, lengths)
        return lambda: reduced

    def reduce_scatter(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        result = super().reduce_scatter(x, lengths)
        self._add(result.numel() * (len(lengths) - 1))
        return result

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        result = super().all_to_all(x, send, receive)
        self._add((result.numel() // max(sum(receive), 1)) * (sum(receive) - receive[self.index]))
        return result


def most_received(patch: pytest.MonkeyPatch, arguments: dict[str, Any], mesh_text: str, pins: dict[str, str]) -> int:
    """Elements that the rank which receives most receives in one forward; the result is verified. The pins are by
    target, or by the name of an input or parameter."""
    spec, mesh = f"{__file__}:build", Mesh.parse(mesh_text)
    graph = capture(spec, arguments, training=False)
    named = {op.target.partition(".")[2]: op.name for op in graph.ops}
    texts = [f"op:{named[what]}={how}" if what in named else f"{what}={how}" for what, how in pins.items()]
    hardware = load_hardware("a100-80g-sxm")
    plan = search(graph, hardware, SearchRequest(mesh, pins=tuple(texts)))
    program = lower(plan, graph)
    patch.setattr(lockstep, "ThreadTransport", _Counting)
    patch.setattr(_Counting, "received", Counter())
    proof = check_files(make_case(spec, arguments, graph, steps=1), program, emit(program, plan, graph))
    assert proof.passed, proof.failure
    return max(_Counting.received.values(), default=0)


def summed(over: int, elements: int) -> int:
    """What a ring's all-reduce brings to each rank."""
    return 2 * (over - 1) * elements // over


SQUARE = {"kind": "matmul", "x": "64x64"}
PRODUCTS = [  # (cuts, what the original moves)
    ("((1, 1), (1, 8))", 0),
    ("((1, 8), (8, 1))", summed(8, 64 * 64)),
    ("((4, 2), (2, 1))", summed(2, 16 * 64)),
    ("((4, 1), (1, 2))", 0),
    ("((1, 4), (4, 1))", summed(4, 64 * 64)),
    ("((2, 2), (2, 2))", summed(2, 32 * 32)),
    ("((2, 4), (4, 1)) -> ((8, 1),)", summed(4, 32 * 64) // 2),
    ("((8, 1), (1, 1))", 0),
]


@pytest.mark.parametrize(("cuts", "bound"), quick_at(PRODUCTS, 5), ids=[cuts for cuts, _ in PRODUCTS])
def test_products(monkeypatch: pytest.MonkeyPatch, cuts: str, bound: int) -> None:
    pins = {"linear_in_out": cuts}
    if "->" not in cuts:  # the relu takes what the product leaves
        rows, columns = cuts.replace("(", "").replace(")", "").split(", ")[::3]
        pins["relu"] = f"(({rows}, {columns}),)"
    assert most_received(monkeypatch, SQUARE, "a=2,b=2,c=2", pins) <= bound


BATCHED = [
    ("((2, 4, 1, 1), (2, 4, 1, 1))", 0),
    ("((1, 1, 1, 8), (1, 1, 8, 1))", summed(8, 8 * 16 * 32 * 32)),
    ("((2, 2, 1, 2), (2, 2, 2, 1))", summed(2, 4 * 8 * 32 * 32)),
]


@pytest.mark.parametrize(("cuts", "bound"), quick_at(BATCHED, 1), ids=[cuts for cuts, _ in BATCHED])
def test_batched_products(monkeypatch: pytest.MonkeyPatch, cuts: str, bound: int) -> None:
    arguments = {"kind": "batched", "x": "8x16x32x32", "y": "8x16x32x32"}
    assert most_received(monkeypatch, arguments, "a=2,b=2,c=2", {"matmul": cuts}) <= bound


TABLES = [
    ({"embedding": "((8, 1), (1, 1)) -> ((8, 1, 1),)"}, 7 * 2 * 16 * 64),  # reduce-scatter
    ({"embedding": "((1, 1), (8, 1))"}, 0),
    ({"embedding": "((1, 8), (1, 1))", "relu": "((1, 1, 8),)"}, 0),
]


@pytest.mark.parametrize(("pins", "bound"), quick_at(TABLES, 1), ids=["rows", "indices", "columns"])
def test_tables(monkeypatch: pytest.MonkeyPatch, pins: dict[str, str], bound: int) -> None:
    arguments = {"kind": "table", "x": "1", "y": "16x16"}
    assert most_received(monkeypatch, arguments, "a=2,b=4", pins) <= bound


RESHAPES = [
    ("64x8x8", "((8, 1),)", "((8, 1, 1),)"),
    ("64x8x8", "((2, 4),)", "((2, 4, 1),)"),
    ("8x8x64", "((2, 4),)", "((2, 1, 4),)"),
]


@pytest.mark.parametrize(("shape", "before", "after"), quick_at(RESHAPES, 0))
def test_reshapes_need_nothing(monkeypatch: pytest.MonkeyPatch, shape: str, before: str, after: str) -> None:
    arguments, pins = {"kind": "reshape", "x": "64x64", "y": shape}, {"relu": before, "exp": after}
    assert most_received(monkeypatch, arguments, "a=2,b=4", pins) == 0


INPUTS = [  # (how the batch comes, how the operator takes it, what the original moves)
    ("((8, 1),)", "((8, 1),)", 0),
    ("((1, 8),)", "((8, 1),)", 7 * 64 * 8),
    ("((4, 1),)", "((8, 1),)", 0),
]


@pytest.mark.parametrize(("given", "taken", "bound"), quick_at(INPUTS, 2))
def test_how_the_batch_comes(monkeypatch: pytest.MonkeyPatch, given: str, taken: str, bound: int) -> None:
    arguments, pins = {"kind": "relu", "x": "64x64"}, {"x": given, "relu": taken}
    received = most_received(monkeypatch, arguments, "a=4,b=2", pins)
    assert received <= bound
    if bound:  # an all-to-all instead of a gather and a cut
        assert received * 8 == bound


@pytest.mark.parametrize("rows", quick_at([128, 130], 1))  # the original refuses 130: 8 does not divide it
def test_weights_stored_over_all_ranks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Stored over 8, used over 4: gathered over 2, and the sum over 4. The original halves the rows of the slice, this
    its columns (several axes on one dim nest in mesh order): the same elements."""
    arguments = {"kind": "matmul", "x": f"64x{rows}", "rows": rows, "columns": 128}
    pins = {"w": "((4, 2),)", "linear_in_out": "((2, 4), (4, 1))", "relu": "((2, 1),)"}
    gathered = -(-rows // 4) * 64
    assert gathered < most_received(monkeypatch, arguments, "a=2,b=4", pins) <= gathered + summed(4, 32 * 128)


def test_cuts_of_three_are_taken_where_the_mesh_has_three(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"kind": "matmul", "x": "63x64"}
    pins = {"linear_in_out": "((3, 1), (1, 1))", "relu": "((3, 1),)"}
    assert most_received(monkeypatch, arguments, "a=3", pins) == 0
    arguments = {"kind": "matmul", "x": "64x64"}  # 22, 22 and 20 rows
    assert most_received(monkeypatch, arguments, "a=3", pins) == 0
