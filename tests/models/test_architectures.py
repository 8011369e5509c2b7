"""Models that nobody here wrote: captured, planned, and every plan run against the original; the rest is `slow`.

The quick ones take one random plan on dp=2,tp=2, which uses far more rules than the best; the slow ones are the whole
measurement of benchmarks/architectures.py.
"""

from __future__ import annotations

import importlib

import pytest
from torch import nn

from benchmarks.architectures import Row, cells, measure, page, plans, table
from tests.models import NAMES

QUICK = ("llama", "bert", "t5", "vit", "resnet")


@pytest.mark.parametrize("name", QUICK)
def test_trains_and_infers_the_same(name: str) -> None:
    row = measure(name, meshes=("dp=2,tp=2",), seeds=(3,), best=())
    assert row.passed, row.reasons
    assert row.verified == 2 and 0.0 < row.largest_error < 1e-8
    assert row.without_rule == ()


@pytest.mark.parametrize("name", ("nanogpt", "blocks"))
def test_first_own_models_under_their_best_plan(name: str) -> None:
    """A loop over blocks, then a loss of flattened logits and labels."""
    row = measure(name, meshes=(), seeds=(), best=("dp=2,tp=2",))
    assert row.passed and row.verified == 1, row.reasons


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in QUICK])
def test_every_architecture(name: str) -> None:
    row = measure(name, meshes=("dp=2,tp=2",), seeds=(3,), best=())
    assert row.passed, row.reasons


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_builder(name: str) -> None:
    module, _, function = NAMES[name].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_a_failure_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(loss: bool = True) -> tuple[nn.Module, tuple[()]]:
        raise ValueError("no such | layer")

    monkeypatch.setattr("tests.models.plain.lenet", broken)
    row = measure("lenet")
    assert not row.passed and row.plans == 0
    assert [reason.partition(":")[0] for reason in row.reasons] == ["training", "inference"]
    assert "no such | layer" in row.reasons[0]
    assert "no such \\| layer" in table([row])


def test_the_table_counts_what_passed() -> None:
    good = Row("good", 9, 3, ("aten.new",), 2, 2, 1e-15)
    bad = Row("bad", 9, 3, (), 2, 1, 0.5, ("tp=2 best: output differs",))
    assert cells(good) == ("good", "9", "3", "new", "2 of 2", "1.0e-15", "")
    assert not bad.passed and cells(bad)[4] == "1 of 2"
    assert page([good, bad]).splitlines()[2].startswith("1 of 2 architectures")


def test_the_plans_are_the_best_and_the_random_ones_of_each_mesh() -> None:
    from autoshard.graph.capture import capture

    graph = capture(NAMES["lenet"], {})
    labels = [label for label, _ in plans(graph, ("tp=2", "dp=2,tp=2"), (1, 2), best=("tp=2",))]
    assert labels == ["tp=2 best", *(f"{mesh} random:{seed}" for mesh in ("tp=2", "dp=2,tp=2") for seed in (1, 2))]
