"""Random state and inputs: nothing is left that hides a fault."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.graph.model import Graph, Op, Tensor
from autoshard.verify.randomise import integer_ranges, randomise_inputs, randomise_state

BUFFERS = ("mask", "ids", "batch_norm.running_var", "batch_norm.running_mean")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.batch_norm = nn.Embedding(50, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), persistent=False)
        self.register_buffer("folded", torch.ones(3))
        self.register_buffer("ids", torch.arange(3))


def test_state() -> None:
    model = Net()
    randomise_state(model, 0, BUFFERS)
    assert model.head.weight is model.embedding.weight
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point():
            assert value.dtype == torch.float64, name
        if name not in ("mask", "ids", "folded", "batch_norm.num_batches_tracked"):
            assert torch.isfinite(value).all() and value.detach().flatten().unique().numel() == value.numel(), name
    assert 0.7 < model.norm.weight.mean() < 1.3 and model.norm.weight.std() > 0.05
    assert abs(model.head.bias.mean()) < 0.2
    assert (model.batch_norm.running_var > 0).all()
    assert model.mask[0, 1] == -torch.inf and model.mask[0, 0] == 0
    assert model.folded.tolist() == [1, 1, 1]
    assert model.ids.tolist() == [0, 1, 2]


def test_the_seed_decides() -> None:
    first, second, third = Net(), Net(), Net()
    for model, seed in ((first, 0), (second, 0), (third, 1)):
        randomise_state(model, seed, BUFFERS)
    assert torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.head.weight, third.head.weight)


def language_model() -> Graph:
    """ids -> embedding -> logits; labels padded, shifted and flattened into a cross entropy, as Hugging Face does."""
    tensors = (
        Tensor("x", (4, 3), "float32"), Tensor("ids", (4, 6), "int64"), Tensor("labels", (4, 6), "int64"),
        Tensor("positions", (4, 6), "int64"), Tensor("table", (50, 8), "float32", True),
        Tensor("e", (4, 6, 8), "float32", True),
        Tensor("padded", (4, 7), "int64"), Tensor("shifted", (4, 6), "int64"), Tensor("flat", (24,), "int64"),
        Tensor("logits", (24, 50), "float32", True), Tensor("loss", (), "float32", True),
        Tensor("far", (4, 6), "int64"),
    )  # fmt: skip
    ops = (
        Op("embedding", "aten.embedding", ("table", "ids"), (), ("e",)),
        Op("pad", "aten.pad", ("labels",), (), ("padded",)),
        Op("slice", "aten.slice", ("padded",), (), ("shifted",)),
        Op("view", "aten.view", ("shifted",), (), ("flat",)),
        Op("add", "aten.add", ("positions",), (), ("far",)),
        Op("loss", "aten.cross_entropy_loss", ("logits", "flat"), (("ignore_index", -7),), ("loss",)),
    )
    return Graph("lm", tensors, ("x", "ids", "labels", "positions"), (), (), ops, ("loss",), "loss")


def test_ranges_of_integer_inputs() -> None:
    ranges = integer_ranges(language_model())
    assert set(ranges) == {"ids", "labels"}
    assert (ranges["ids"].high, ranges["ids"].ignored) == (50, None)
    assert (ranges["labels"].high, ranges["labels"].ignored) == (50, -7)


def test_inputs() -> None:
    zeros = torch.zeros(4, 6, dtype=torch.int64)
    positions = torch.arange(6).expand(4, 6)
    x, ids, labels, kept = randomise_inputs(language_model(), [torch.zeros(4, 3), zeros, zeros, positions], 0)
    assert x.dtype == torch.float64 and x.unique().numel() == 12
    for batch in (x, ids, labels):
        assert len({tuple(row.tolist()) for row in batch}) == 4
    assert int(ids.min()) >= 0 and int(ids.max()) < 50
    ignored = (labels == -7).sum(-1).tolist()
    assert ignored[0] == 0 and len(set(ignored)) > 2 and int(labels.max()) < 50
    assert torch.equal(kept, positions)
    again = randomise_inputs(language_model(), [torch.zeros(4, 3), zeros, zeros, positions], 0)
    assert torch.equal(again[1], ids)
    other = randomise_inputs(language_model(), [torch.zeros(4, 3), zeros, zeros, positions], 1)
    assert not torch.equal(other[1], ids)
