"""A fresh model is the same on every mesh, and each device draws and reads little more than it holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.emit.runtime import (
    ParallelMesh,
    WeightFiles,
    init_parameter,
    init_parameters,
    initialisation,
    local,
    shard_buffer,
    shard_parameter,
    sharding,
)

CASES = [
    ((40, 24), "S0 R", None),
    ((40, 24), "S1 S0", None),
    ((40, 24), "S0 S0", None),
    ((41, 7), "S0 S1", None),
    ((36, 10), "R S1", (3, 12, 10)),  # 3 blocks, as a fused projection
    ((36, 10), "S1 S1", (3, 3, 4, 10)),
    ((5,), "R S0", None),
    ((4, 6, 3, 2), "S1 R", None),
    ((1, 6), "S1 R", None),
    ((), "R R", None),
]


def held(shape: tuple[int, ...], layout: str, split: tuple[int, ...] | None, rank: int) -> Tensor:
    mesh = ParallelMesh({"dp": 2, "tp": 2}, rank, lambda *_: None, torch.device("cpu"))  # type: ignore[arg-type, return-value]
    return shard_buffer("w", shape, layout, mesh, split_shape=split)


class InParts:
    """Stands for a tensor in a file; notes how many numbers were read."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.shape, self.read = whole, tuple(whole.shape), 0

    def __getitem__(self, part: Any) -> Tensor:
        piece = self.whole[part]
        self.read += piece.numel()
        return piece


@pytest.mark.parametrize(("shape", "layout", "split"), CASES)
def test_parts_are_those_of_the_whole(
    shape: tuple[int, ...], layout: str, split: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file that is read in parts, and of numbers that are drawn in tiles, here of 9 columns and up to 10 rows."""
    monkeypatch.setattr(initialisation, "TILE", 96)
    whole = torch.randn(shape)
    drawn = shard_buffer("w", shape, "R", ParallelMesh({"all": 1}, 0, lambda *_: None, torch.device("cpu")))  # type: ignore[arg-type, return-value]
    init_parameter(drawn, ("normal", 1.0, 2.0), 5)
    for rank in range(4):
        shard = held(shape, layout, split, rank)
        file = InParts(whole)
        assert torch.equal(sharding(shard).part(file), sharding(shard).part(whole))
        assert split or file.read == local(shard).numel()
        init_parameter(shard, ("normal", 1.0, 2.0), 5)
        assert torch.equal(local(shard), sharding(shard).part(local(drawn)))


def test_numbers_are_as_the_recipe_says() -> None:
    weight = held((300, 400), "R R", None, 0)
    init_parameter(weight, ("normal", 1.0, 2.0), 1)
    assert float(weight.mean()) == pytest.approx(1.0, abs=0.05) and float(weight.std()) == pytest.approx(2.0, abs=0.05)
    rows = torch.corrcoef(weight)
    assert float((rows - torch.eye(300)).abs().max()) < 6 / math.sqrt(400)
    init_parameter(weight, ("trunc_normal", 0.0, 1.0, -0.5, 0.5), 1)
    assert float(weight.abs().max()) <= 0.5
    init_parameter(weight, ("constant", 3.0))
    assert bool((weight == 3).all())


def test_what_nothing_says_starts_small_and_is_named() -> None:
    """As the note of a run says it: matrices are drawn with a deviation of 0.02, vectors are zero; others as said."""
    model = torch.nn.Module()
    mesh = ParallelMesh({"dp": 1}, 0, lambda *_: None, torch.device("cpu"))  # type: ignore[arg-type, return-value]
    for name, shape, init in (("w", (300, 400), ()), ("b", (7,), ()), ("said", (300, 400), ("normal", 0.0, 1.0))):
        model.register_parameter(name, shard_parameter(name, shape, "R", mesh, init=init))
    assert init_parameters(model, 1) == ["w", "b"]
    values = {name: local(parameter).detach() for name, parameter in model.named_parameters()}
    assert float(values["w"].std()) == pytest.approx(0.02, rel=0.02) and abs(float(values["w"].mean())) < 1e-3
    assert not values["b"].any() and float(values["said"].std()) == pytest.approx(1.0, rel=0.02)


def test_a_device_draws_its_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    normal = initialisation._DRAWN["normal"]
    monkeypatch.setitem(
        initialisation._DRAWN, "normal", lambda x, *args, **more: drawn.append(x.numel()) or normal(x, *args, **more)
    )
    init_parameter(held((1 << 12, 2048), "S0 S0", None, 3), ("normal", 0.0, 1.0))
    assert sum(drawn) == (1 << 12) * 2048 // 4


def test_weights_of_every_rank_are_read_in_part_or_whole(tmp_path: Path) -> None:
    """Numbers without a dim too: counters of batch norm, the scale of logits."""
    from safetensors.torch import save_file

    saved = {"count": torch.tensor(7), "scale": torch.tensor(2.5), "bias": torch.arange(5.0), "w": torch.randn(4, 6)}
    save_file(saved, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert set(files) == saved.keys() and len(files) == 4
    for name, value in saved.items():
        assert files[name].shape == tuple(value.shape)
        whole = files[name][tuple(slice(None) for _ in value.shape)]
        assert whole.dtype == value.dtype and torch.equal(whole, value) and torch.equal(files[name][()], value)
    assert torch.equal(files["w"][1:3, 2:], saved["w"][1:3, 2:]) and torch.equal(
        files["bias"][(slice(4, 5),)], torch.tensor([4.0])
    )
