"""What the models share: a library model as one that returns its loss (or its logits), and random examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]
VOCABULARY = 67  # nothing divides it: the last device holds less
CLASSES = 10


class Task(nn.Module):
    """Calls `model` with its inputs by `names`; gives the loss where there are labels, else the `result`."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], result: str = "logits", **fixed: object) -> None:
        super().__init__()
        self.model, self.names, self.result, self.fixed = model, names, result, fixed

    def forward(self, *inputs: Tensor) -> Any:
        named = dict(zip(self.names, inputs, strict=True))
        outputs = self.model(**named, **self.fixed)
        return outputs.loss if outputs.loss is not None else getattr(outputs, self.result)


def tokens(batch: int, sequence: int, high: int = VOCABULARY) -> Tensor:
    return torch.randint(0, high, (batch, sequence))


def images(batch: int, size: int, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, size, size)


def language(model: nn.Module, batch: int, sequence: int, loss: bool) -> Built:
    """A label for each token."""
    names = ("input_ids", "labels") if loss else ("input_ids",)
    return Task(model, names), tuple(tokens(batch, sequence) for _ in names)


def classifier(model: nn.Module, batch: int, size: int, loss: bool) -> Built:
    """A label for each image."""
    names = ("pixel_values", "labels") if loss else ("pixel_values",)
    labels = (torch.randint(0, CLASSES, (batch,)),) if loss else ()
    return Task(model, names), (images(batch, size), *labels)
