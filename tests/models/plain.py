"""Models written with torch.nn alone: `NAME(batch, ..., loss)`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.common import CLASSES, VOCABULARY, Built, images, tokens


class Sequence(nn.Module):
    """Embedding, a body over (batch, sequence, width), and a head over the vocabulary."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(VOCABULARY, width), body
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.body(self.embedding(ids))
        logits: Tensor = self.head(x[0] if isinstance(x, tuple) else x)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def lstm(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    model = Sequence(nn.LSTM(32, 32, layers, batch_first=True), 32)
    return model, tuple(tokens(batch, sequence) for _ in range(1 + loss))


def transformer_encoder(batch: int = 4, sequence: int = 8, layers: int = 2, loss: bool = True) -> Built:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    model = Sequence(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), 32)
    return model, tuple(tokens(batch, sequence) for _ in range(1 + loss))


def _twice(inner: int, outer: int) -> nn.Sequential:
    """Two convolutions, each with batch norm."""
    steps = [(inner, outer), (outer, outer)]
    blocks = [(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)) for a, b in steps]
    return nn.Sequential(*(layer for layers in blocks for layer in layers))


class UNet(nn.Module):
    """Ronneberger et al. 2015, arXiv:1505.04597, with batch norm: down, up, and across."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip((3, *widths), widths, strict=False))
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.joined = nn.ModuleList(_twice(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        across = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            across.append(x)
        for up, block, other in zip(self.up, self.joined, across[-2::-1], strict=True):
            x = block(torch.cat([other, up(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits if labels is None else F.cross_entropy(logits, labels)


def unet(batch: int = 4, size: int = 16, loss: bool = True) -> Built:
    labels = (torch.randint(0, CLASSES, (batch, size, size)),) if loss else ()
    return UNet(), (images(batch, size), *labels)


def lenet(batch: int = 4, loss: bool = True) -> Built:
    model = LeNet()
    return model, (images(batch, 28, 1), *([torch.randint(0, CLASSES, (batch,))] if loss else []))


class LeNet(nn.Module):
    """LeCun et al. 1998."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.head = nn.Sequential(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, CLASSES))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.first(x)), 2)
        x = F.avg_pool2d(torch.tanh(self.second(x)), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits if labels is None else F.cross_entropy(logits, labels)
