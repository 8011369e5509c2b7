"""Random state: nothing is left that hides a fault."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.verification.original.randomise import randomise_state

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


def test_mildly_keeps_signs_and_zeros() -> None:
    model = Net()
    model.norm.bias.data = torch.tensor([-2.0, 0.0] * 4)
    randomise_state(model, 0, BUFFERS, mildly=True)
    assert ((model.norm.weight > 0.8) & (model.norm.weight < 1.2)).all() and model.norm.weight.std() > 0.01
    assert model.norm.bias[1::2].tolist() == [0] * 4 and (model.norm.bias[::2] < -1.6).all()
    assert model.mask[0, 1] == -torch.inf


def test_vectors_of_one_number_stay_near_it() -> None:
    model = nn.PReLU(6, init=0.25)
    randomise_state(model, 0, ())
    assert (model.weight > 0).all() and model.weight.unique().numel() == 6
