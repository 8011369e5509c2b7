"""MindSpore's example of distributed graph partition: the layers of LeNet on five workers, trained on real digits.

The handwritten digits are those that scikit-learn ships (8 x 8, drawn larger). One worker has one layer; what has no
place runs where its input is made. The loss and the weights are those of one process.

autoshard plan examples/placed_lenet.py:build --mesh dp=1 --hardware cpu-local --out out/placed --verify
torchrun --nproc-per-node 5 out/placed/train.py --backend gloo --steps 50 --data examples/placed_lenet.py:make_loader
python examples/placed_lenet.py                      # the same in one process, and its accuracy
python examples/placed_lenet.py weights.pt           # the accuracy of weights that were trained elsewhere
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import autoshard

BATCH, STEPS, TEST = 32, 50, 297
WORKERS = {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)
        for name, rank in WORKERS.items():
            autoshard.place(getattr(self, name), "worker", rank)

    def scores(self, images: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.relu(self.conv1(images)), 2)
        x = functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(images), labels)


def build(double: bool = False) -> tuple[LeNet, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model, images = LeNet(), torch.randn(BATCH, 1, 32, 32)
    return (model.double() if double else model), (images.double() if double else images, torch.zeros(BATCH).long())


def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 32, 32) from 0 to 1, and labels, in an order that is no order of writers."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    order = torch.randperm(len(dataset.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(dataset.images, dtype=torch.float32)[order] / 16
    return functional.interpolate(images[:, None], scale_factor=4), torch.tensor(dataset.target)[order].long()


def make_loader() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches for training, without end."""
    images, labels = digits()
    while True:
        for start in range(0, len(labels) - TEST - BATCH + 1, BATCH):
            yield images[start : start + BATCH], labels[start : start + BATCH]


def make_evaluation() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of digits that are not trained on."""
    images, labels = digits()
    for start in range(len(labels) - TEST, len(labels) - BATCH + 1, BATCH):
        yield images[start : start + BATCH], labels[start : start + BATCH]


def accuracy(model: LeNet) -> float:
    """Of the digits that are not trained on."""
    images, labels = digits()
    kind = next(model.parameters()).dtype
    with torch.no_grad():
        return float((model.scores(images[-TEST:].to(kind)).argmax(1) == labels[-TEST:]).double().mean())


def main() -> None:
    model, _ = build()
    if len(sys.argv) > 1:
        model.load_state_dict(torch.load(sys.argv[1]))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step, (images, labels) in zip(range(1, STEPS + 1), make_loader(), strict=False):
            optimizer.zero_grad()
            loss = model(images, labels)
            loss.backward()
            optimizer.step()
            if step in (1, STEPS):
                print(f"step {step}: loss {loss:.6f}")
    print(f"accuracy {accuracy(model):.4f}")


if __name__ == "__main__":
    main()
