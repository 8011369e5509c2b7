"""Embedding bags: folded at capture, cut by the rows and columns of their tables and by bags; no table travels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.rules import Strategy
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests.forced import check
from tests.models import NAMES
from tests.moved import moved_parameters
from tests.slow import slow

BAGS = "autoshard.embedding_bags"


class Recommender(nn.Module):
    """Bags as `F.embedding_bag` takes them: a matrix of ids, or a list with offsets, in every mode."""

    def __init__(self, rows: int, width: int, tables: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, ids: Tensor, clicks: Tensor) -> Tensor:
        vectors = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)
        return F.binary_cross_entropy_with_logits(self.top(vectors).squeeze(1), clicks)


class Lists(nn.Module):
    """Lists of ids with offsets: an empty bag, a padding row, a weight for each id, a last offset."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(11, 6, mode="sum")
        self.means = nn.EmbeddingBag(11, 6, mode="mean", padding_idx=3, include_last_offset=True)
        self.largest = nn.EmbeddingBag(11, 6, mode="max")
        self.weights = nn.Parameter(torch.rand(13))
        self.out = nn.Linear(18, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        ends = F.pad(offsets, (0, 1), value=13)
        options = {"mode": "sum", "sparse": True, "per_sample_weights": self.weights}
        sums = F.embedding_bag(ids, self.sums.weight, offsets, **options)
        bags = [sums, self.means(ids, ends), self.largest(ids, offsets)]
        return self.out(torch.cat(bags, 1)).square().mean()


def recommender(
    rows: int = 23, width: int = 8, tables: int = 3, hidden: int = 12, batch: int = 6, length: int = 4
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    ids = torch.randint(0, rows, (batch, tables, length))
    return Recommender(rows, width, tables, hidden), (ids, torch.rand(batch))


def lists() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Lists(), (torch.randint(0, 11, (13,)), torch.tensor([0, 4, 4, 9]))


def bags_by(factor: str) -> Callable[[Op, Strategy], bool]:
    """Every bag has this choice on some axis, where it is offered one."""

    def allowed(op: Op, strategy: Strategy) -> bool:
        whole = factor == "vocabulary" and op.target == BAGS and op.attribute("mode") == "max"
        return op.target != BAGS or whole or any(choice.factor == factor for choice in strategy.choices)

    return allowed


def bags_of(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.target == BAGS]


def test_a_matrix_of_ids_stays_one() -> None:
    graph = capture(NAMES["dlrm_bags"], {})
    assert [graph.tensor(op.operands[1] or "").shape for op in bags_of(graph)] == [(8, 3)] * 4
    assert not [op for op in graph.ops if op.target in ("aten.embedding_bag", "aten.arange")]


def test_lists_keep_their_offsets() -> None:
    graph = capture(f"{__file__}:lists", {})
    ids, _ = graph.inputs
    assert [op.operands[1] for op in bags_of(graph)] == [ids] * 3
    assert [graph.tensor(op.operands[2] or "").shape for op in bags_of(graph)] == [(4,)] * 3
    (said,) = graph.assumed
    assert said.startswith("gradients are dense, sparse=True says nothing (at")
    assert dict(bags_of(graph)[1].attributes) == {"mode": "mean", "padding_idx": 3}
    assert [low for columns in graph.column_ranges for low, _ in columns.bounds] == [0, 3, 6, 9]  # synthetic ones


@pytest.mark.parametrize("factor", ["vocabulary", slow("d"), slow("b")])
@pytest.mark.parametrize("name", [slow("recommender"), "lists"])
def test_programs_are_right(name: str, factor: str) -> None:
    functions, largest = check(f"{__file__}:{name}", "dp=2,tp=2", bags_by(factor), seeds=(0, 1))
    assert "parallel_embedding_bag" in functions or (factor != "vocabulary" and (name, factor) != ("lists", "b"))
    assert largest < 1e-9


def test_tables_of_ten_million_rows_stay_where_they_are() -> None:
    """As an expert would: the rows (or columns) of each table over the devices, and only bags travel."""
    sizes = {"rows": 10_000_000, "width": 128, "tables": 8, "hidden": 1024, "batch": 4096}
    graph = capture(f"{__file__}:recommender", sizes)
    program = lower(search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse("tp=8"))), graph)
    tables = {p.path for p in program.parameters if p.path.startswith("tables.")}
    assert len(tables) == 8
    assert not tables & moved_parameters(program)
