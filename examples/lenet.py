"""LeNet-5, the convolutional network for handwritten digits."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VERIFY = {"batch": 16}


class LeNet(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=5)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.relu(self.conv1(images)), 2)
        x = functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        x = torch.relu(self.fc2(x))
        return functional.cross_entropy(self.fc3(x), labels)


def build(batch: int = 256, classes: int = 10) -> tuple[LeNet, tuple[Tensor, ...]]:
    """The model, and one example batch: images (batch, 1, 32, 32) and integer labels (batch)."""
    return LeNet(classes), (torch.randn(batch, 1, 32, 32), torch.randint(0, classes, (batch,)))
