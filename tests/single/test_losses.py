"""Losses in whole models under plans that cut their rows and classes: weighted means are over all devices."""

from __future__ import annotations

import pytest

from autoshard.ir.graph import Op
from autoshard.rules import Strategy
from tests.forced import check
from tests.small_models import LOSSES, spec


def cut_losses(op: Op, strategy: Strategy) -> bool:
    """Every loss is cut on every axis."""
    is_loss = op.results and (op.target.endswith(("_loss", "_loss_nd", "_logits")) or "kl_div" in op.target)
    is_loss = is_loss or op.target == "aten.binary_cross_entropy"
    return not is_loss or all(choice.kind == "factor" for choice in strategy.choices)


@pytest.mark.parametrize(("mesh", "smoothing"), [("tp=2", 0.1), ("dp=2,tp=2", 0.0), ("tp=3", 0.2)])
def test_weights_of_classes(mesh: str, smoothing: float) -> None:
    found, largest = check(spec("weighted"), mesh, cut_losses, (1, 2), {"smoothing": smoothing})
    assert {"parallel_cross_entropy", "parallel_nll_loss"} <= found
    assert largest < 1e-9


@pytest.mark.parametrize("kind", LOSSES)
def test_means_of_every_kind(kind: str) -> None:
    found, largest = check(spec("regression"), "dp=2,tp=2", cut_losses, (1,), {"kind": kind})
    assert kind == "kl" or "parallel_loss" in found  # a batch mean is a sum and a quotient
    assert largest < 1e-9
