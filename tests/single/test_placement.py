"""Constructors that read values: what is small has them, what is large has none."""

from __future__ import annotations

import math

import pytest
import torch

from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.constructor import placement
from autoshard.graph_capture.load_model import load_model

WIDE = 2048  # a square of it is large


class Reads(torch.nn.Module):
    """As libraries do: rates by `.item()`, a table half built without values, a large weight's own scale."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.large = torch.nn.Linear(WIDE, WIDE)
        self.small = torch.nn.Linear(WIDE, 4)
        self.rate, self.ready = 1.0, True
        frequencies = 1.0 / 10.0 ** (torch.arange(0, 8, 2).float() / 8)
        if reads == "is_meta":
            self.ready = not frequencies.is_meta
            if not self.ready:
                return
        if reads == "numpy":
            frequencies = torch.from_numpy(frequencies.numpy() * 2)
        if reads == "item":
            self.rate = [float(x) for x in torch.linspace(0.25, 0.5, 3)][1]
        self.register_buffer("table", torch.tensor([f / 8 if 2 * math.pi / f < 8 else f for f in frequencies]))
        if reads == "a large one":
            self.register_buffer("scale", self.large.weight[0, :4] * self.table)
        if reads == "a large one in place":
            self.table.copy_(self.large.weight[0, :4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.ready
        scale = self.scale if hasattr(self, "scale") else self.table
        return (self.small(self.large(x)) * scale * self.rate).square().mean()


def build(reads: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Reads(reads), (torch.randn(2, WIDE),)


@pytest.mark.parametrize("reads", ["is_meta", "item", "numpy", "a large one"])
def test_only_what_is_large_has_no_values(reads: str) -> None:
    model, _ = load_model(f"{__file__}:build", {"reads": reads})
    assert model.large.weight.is_meta and not model.small.weight.is_meta
    expected = build(reads)[0]
    assert model.rate == expected.rate and model.ready
    assert torch.equal(model.table, expected.table)
    if reads == "a large one":
        assert model.scale.is_meta
    assert capture(f"{__file__}:build", {"reads": reads}).loss


def test_what_a_large_one_gives_a_small_one_in_place_has_its_values() -> None:
    model, _ = load_model(f"{__file__}:build", {"reads": "a large one in place"})
    assert not model.large.weight.is_meta
    assert torch.equal(model.table, model.large.weight[0, :4])


def test_a_constructor_that_reads_nothing_makes_no_values() -> None:
    with placement.placed("meta") as queried:
        layer = torch.nn.Linear(2, 2)
        assert layer.weight.is_meta  # this file's own question
    assert queried()
    with placement.placed("meta") as queried:
        torch.nn.Linear(2, 2)
    assert not queried()
