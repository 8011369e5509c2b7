"""Images cut by height and width: a loader reads its part of each alone, and training is that of the whole images."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

import autoshard
from tests import launched

LOADER = """
import torch

def make_loader(parts):
    assert parts["t"] == (slice(0, 4),), parts
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 8, 12, generator=generator)
        labels = torch.randint(0, 5, (4,), generator=generator)
        own = images[parts["x"]] if step else images[:, :, parts["x"][2]]
        assert own.shape == ((4, 3, 4, 6) if step else (4, 3, 4, 12)), own.shape
        yield own, labels
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), t)


def test_a_loader_reads_its_part(tmp_path: Path) -> None:
    """`dataset_strategy` cuts two dims. The first step's images come whole along one of them."""
    torch.manual_seed(0)
    model = Net()
    example = torch.randn(4, 3, 8, 12), torch.randint(0, 5, (4,))
    cuts = ((1, 1, 2, 2), (1,))
    plan = autoshard.plan(model, example, hardware="cpu-local", mesh="h=2,w=2", dataset_strategy=cuts)
    assert [str(one.layout) for one in plan.plan.inputs] == ["S2 S3", "R R"]
    folder = autoshard.write(plan, tmp_path / "package")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "data.py").write_text(LOADER)
    data = ["--data", f"{tmp_path}/data.py:make_loader", "--weights", f"{tmp_path}/weights.pt"]
    options = ["--backend", "gloo", "--steps", "3", "--lr", "0.01", *data]
    done = launched.torchrun(folder / "train.py", 4, *options)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", done.stdout)]
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 8, 12, generator=generator)
        loss = model(images, torch.randint(0, 5, (4,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(float(loss.detach()))
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=2e-5), (losses, expected)
