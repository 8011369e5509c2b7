"""A three-layer network for regression: the smallest model worth splitting."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VERIFY = {"batch": 16, "features": 32, "hidden": 64, "outputs": 8}


class MLP(nn.Module):
    def __init__(self, features: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.third = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x))
        return functional.mse_loss(self.third(x), target)


def build(
    batch: int = 64, features: int = 1024, hidden: int = 4096, outputs: int = 16
) -> tuple[MLP, tuple[Tensor, ...]]:
    """The model, and one example batch: inputs (batch, features) and targets (batch, outputs)."""
    return MLP(features, hidden, outputs), (torch.randn(batch, features), torch.randn(batch, outputs))
