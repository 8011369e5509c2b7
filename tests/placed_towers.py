"""A tower of images, a projector and a tower of text, small: for places with meshes of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Towers(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(12, 18), nn.GELU(), nn.Linear(18, 8))
        self.language = nn.ModuleDict(
            {"words": nn.Embedding(24, 8), "up": nn.Linear(8, 24), "down": nn.Linear(24, 8), "head": nn.Linear(8, 24)}
        )
        self.tie = tie

    def forward(self, images: Tensor, words: Tensor, labels: Tensor) -> Tensor:
        seen = self.vision(images)
        x = torch.cat([self.language["words"](words), seen], 1)
        x = x + self.language["down"](functional.gelu(self.language["up"](x)))
        if self.tie:
            x = functional.linear(x @ self.vision[2].weight, self.vision[2].weight)
        logits = self.language["head"](x[:, : words.shape[1]])
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(tie: bool = False) -> tuple[Towers, tuple[Tensor, Tensor, Tensor]]:
    words = torch.randint(0, 24, (6, 4))
    return Towers(tie), (torch.randn(6, 5, 12), words, torch.randint(0, 24, (6, 4)))
