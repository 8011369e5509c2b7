"""Rows of a table in unequal parts: as a pin, in a file, in the model's code; verified, priced, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
from autoshard.api.planned import PlannedModel
from autoshard.cli import commands
from autoshard.errors import UserError
from tests.slow import quick_at

PARTS = (10, 20, 30, 4)
TEXT = """
import autoshard
import torch


class Ranker(torch.nn.Module):
    def __init__(self, rows=64, coded=False):
        super().__init__()
        self.coded = coded
        self.users = torch.nn.Embedding(rows, 8)
        self.tags = torch.nn.EmbeddingBag(rows, 8, mode="sum")
        self.top = torch.nn.Linear(16, 3)

    def forward(self, ids, labels):
        embedding = torch.nn.functional.embedding
        if self.coded:
            embedding = autoshard.operator(embedding, in_strategy=(((10, 20, 30, 4), 1), None))
        found = torch.cat([embedding(ids, self.users.weight).mean(1), self.tags(ids)], 1)
        return torch.nn.functional.cross_entropy(self.top(found), labels)


def build(rows=64, coded=False):
    numbers = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (8,), generator=numbers)
    return Ranker(rows, coded), (torch.randint(0, rows, (8, 4), generator=numbers), labels)
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tables") / "ranker.py"
    path.write_text(TEXT, encoding="utf-8")
    return f"{path}:build"


def planned(spec: str, arguments: Any = None, **more: Any) -> PlannedModel:
    return autoshard.plan(spec, arguments=arguments, **{"hardware": "cpu-local", "mesh": "dp=2,tp=4"} | more)


def layouts(plan: PlannedModel) -> dict[str, str]:
    return {name: str(one["layout"]) for name, one in autoshard.parameter_layouts(plan).items()}


@pytest.mark.parametrize(
    ("pins", "held"),
    quick_at(
        [
            ({"users.weight": ((PARTS, 1),), "embedding": ((PARTS, 1), None)}, {"users.weight": "R S0[10+20+30+4]"}),
            ({"users.weight": "S0[10+20+30+4]@tp,Shard(1)@dp"}, {"users.weight": "S1 S0[10+20+30+4]"}),
            ({"tags": ((PARTS, 1), None), "tags.weight": "S0[10+20+30+4]@tp"}, {"tags.weight": "R S0[10+20+30+4]"}),
        ],
        0,
    ),
)
def test_as_pins(spec: str, pins: dict[str, Any], held: dict[str, str]) -> None:
    plan = planned(spec, pins=pins)
    assert held.items() <= layouts(plan).items()
    assert autoshard.verify(plan).passed
    used = [row["strategy"] for row in autoshard.operator_strategies(plan) if row["decided_by"] == "pin"]
    assert all("vocabulary[10+20+30+4]" in strategy for strategy in used)


def test_in_the_models_code_in_a_file_and_on_the_command_line(spec: str, tmp_path: Path) -> None:
    plan = planned(spec, {"coded": True})
    assert autoshard.operator_strategies(plan)[0]["strategy"].endswith("vocabulary[10+20+30+4]")
    assert autoshard.verify(plan).passed
    file = tmp_path / "pins.toml"
    file.write_text('"users.weight" = [[[10, 20, 30, 4], 1]]\n"embedding" = "(((10, 20, 30, 4), 1), None)"\n', "utf-8")
    words = ["plan", spec, "--hardware", "cpu-local", "--mesh", "tp=4", "--pins", str(file)]
    assert commands.main([*words, "--out", str(tmp_path / "out")]) == 0
    loaded = autoshard.load_plan(tmp_path / "out")
    assert layouts(loaded)["users.weight"] == "S0[10+20+30+4]"
    assert autoshard.verify(loaded, arguments={"rows": 32}).passed  # in parts of as few rows
    assert commands.main(["explain", str(tmp_path / "out")]) == 0


def test_the_largest_part_is_the_price(spec: str) -> None:
    """30 rows of 8 numbers against 16 of an equal cut: table, gradient and two moments."""
    even, uneven = (
        planned(spec, mesh="tp=4", pins={"users.weight": weight, "embedding": ((use, 1), None), "tags": ((4, 1), None)})
        for weight, use in (("Shard(0)@tp", 4), ("S0[10+20+30+4]@tp", PARTS))
    )
    memory = [plan.plan.parameters[0].parts.memory_bytes for plan in (even, uneven)]
    assert memory[0] and memory[1] * 16 == memory[0] * 30


@pytest.mark.parametrize(
    ("pins", "words", "hint"),
    [
        ({"users.weight": (((10, 20, 30, 3), 1),)}, "make 63 rows, and the table has 64", "(10, 20, 30, 4)"),
        ({"users.weight": (((10, 20, 34), 1),)}, "3 parts of given lengths need one axis of 3 devices", ""),
        ({"users.weight": "S0[10+20+30+4]@dp"}, "need an axis of 4 devices, this one has 2", ""),
        ({"users.weight": ((4, (4, 4)),)}, "only rows (dim 0) can be", "((4, 4), 1)"),
        ({"top.weight": (((1, 2), 1),)}, "a table that an embedding reads, which top.weight is not", "users.weight"),
        ({"embedding": (None, ((1, 2, 1, 4), 1))}, "for a table that an embedding reads", "users.weight"),
        ({"users.weight": (((10, 20, 34, 0), 1),)}, "a cut must be at least 1, got 0", ""),
        ({"top": "(None, None, None) -> (((1, 2, 2, 3), 1),)"}, "a result is cut in equal parts", ""),
    ],
)
def test_refused(spec: str, pins: dict[str, Any], words: str, hint: str) -> None:
    with pytest.raises(UserError) as raised:
        planned(spec, pins=pins)
    assert words in raised.value.message and hint in raised.value.hint


def test_a_layer_that_is_no_table_in_the_models_code() -> None:
    with pytest.raises(UserError, match="a dim is cut at least once, got 0"):
        autoshard.operator(torch.matmul, in_strategy=(((0, 4), 1), None))
