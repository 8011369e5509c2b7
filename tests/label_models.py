"""Losses that are means over labels, as people write them into larger expressions: `build("scaled")`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _per_sequence(a: Tensor, b: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Classes in dim 1, a dim of positions behind."""
    return 2 * F.cross_entropy(a.view(4, -1, 5).transpose(1, 2), y.view(4, -1)) + F.cross_entropy(b, z)


def _losses() -> dict[str, Loss]:
    """Of logits `a` and `b` for labels `y` and `z`. In a `return`, so that the code has no name for what they make."""
    return {
        "plain": lambda a, b, y, z: F.cross_entropy(a, y),
        "scaled": lambda a, b, y, z: F.cross_entropy(a, y) * 0.5,
        "from the left": lambda a, b, y, z: 0.3 * F.cross_entropy(a, y),
        "divided": lambda a, b, y, z: F.cross_entropy(a, y) / 4,
        "negated": lambda a, b, y, z: 2 - F.cross_entropy(a, y).neg(),
        "two": lambda a, b, y, z: F.cross_entropy(a, y) + F.cross_entropy(b, z),
        "two weighted": lambda a, b, y, z: 0.25 * F.cross_entropy(a, y) + 0.75 * F.cross_entropy(b, z),
        "two, the second first": lambda a, b, y, z: F.cross_entropy(b, z) - F.cross_entropy(a, y) * 0.1,
        "stacked": lambda a, b, y, z: torch.stack([F.cross_entropy(a, y), F.cross_entropy(b, z)]).mean(),
        "auxiliary": lambda a, b, y, z: F.cross_entropy(a, y) * 0.9 + 1e-2 * a.logsumexp(-1).square().mean(),
        "likelihood": lambda a, b, y, z: F.nll_loss(F.log_softmax(a, -1), y) * 2,
        "smoothed": lambda a, b, y, z: F.cross_entropy(a, y, label_smoothing=0.1) * 0.5 + b.square().mean(),
        "ignored": lambda a, b, y, z: (
            F.cross_entropy(a, y, ignore_index=2) * 0.5 + F.cross_entropy(b, z, ignore_index=0)
        ),
        "unreduced": lambda a, b, y, z: F.cross_entropy(a, y, reduction="none").mean() * 0.5,
        "masked": lambda a, b, y, z: (F.cross_entropy(a, y, reduction="none") * (z > 2)).mean() + F.cross_entropy(b, z),
        "summed": lambda a, b, y, z: F.cross_entropy(a, y, reduction="sum") * 0.01 + F.cross_entropy(b, z) * 0.5,
        "of probabilities": lambda a, b, y, z: F.cross_entropy(a, F.one_hot(y.clamp(0), 5).float()) * 0.5 + 0 * b.sum(),
        "positions": _per_sequence,
        "distilled": lambda a, b, y, z: (
            0.5 * F.cross_entropy(a, y)
            + 0.5 * F.kl_div(F.log_softmax(a, -1), F.softmax(b.detach()[:, :5], -1), reduction="batchmean")
            + F.cross_entropy(b, z)
        ),
        "the same twice": lambda a, b, y, z: (F.cross_entropy(a, y) + 0.5 * F.cross_entropy(a * 2, y)) / 1.5,
    }


LOSSES = _losses()


class Labelled(nn.Module):
    """Two heads over a stack of layers."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 8)
        self.hidden = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.first, self.second, self.loss = nn.Linear(8, 5), nn.Linear(8, 7), loss

    def forward(self, ids: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        x = x.flatten(0, 1)
        first = self.first(x)
        second = self.second(x)
        return self.loss(first, second, y.flatten(), z.flatten())


def build(name: str = "scaled") -> tuple[nn.Module, tuple[Tensor, ...]]:
    labels = torch.randint(0, 5, (4, 6)), torch.randint(0, 7, (4, 6))
    return Labelled(LOSSES[name]), (torch.randint(0, 13, (4, 6)), *labels)
