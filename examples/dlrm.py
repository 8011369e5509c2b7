"""A recommender in the manner of DLRM: tables of ids, half of them bags, beside dense features.

With 20 million rows a table, the tables and what trains them take 153 GiB: more than two devices have.

autoshard plan examples/dlrm.py:build --mesh dp=2 --hardware a100-80g-sxm --out out/dlrm
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

VERIFY = {"batch": 32, "rows": 200, "width": 8}
DENSE, BAG = 13, 4  # features, ids of a bag


class Recommender(nn.Module):
    def __init__(self, rows: int, width: int, tables: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables // 2))
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables - tables // 2))
        self.top = nn.Sequential(nn.Linear(width * (tables + 1), 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))

    def forward(self, dense: Tensor, bags: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        rows = [bag(bags[:, i]) for i, bag in enumerate(self.bags)]
        rows += [table(ids[:, i]) for i, table in enumerate(self.tables)]
        score = self.top(torch.cat([self.bottom(dense), *rows], dim=1))
        return functional.binary_cross_entropy_with_logits(score.squeeze(1), clicked)


def build(
    batch: int = 8192, rows: int = 20_000_000, width: int = 64, tables: int = 8
) -> tuple[Recommender, tuple[Tensor, ...]]:
    """The model, and one example batch: dense features, ids of bags, ids of tables, clicks."""
    bags, ids = (batch, tables // 2, BAG), (batch, tables - tables // 2)
    inputs = torch.randn(batch, DENSE), torch.randint(rows, bags), torch.randint(rows, ids), torch.rand(batch)
    return Recommender(rows, width, tables), inputs
