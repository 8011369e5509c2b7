"""Along which dynamic sizes batches may be padded: a padded batch then has the loss and gradients of what it holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.graph_capture.capture import capture
from autoshard.replay.padding import padding_of
from tests.dynamic_models import image, spec, words
from tests.single.test_dynamic_capture import IMAGE, TWO, WORDS


class Normed(nn.Module):
    """Batch norm compares samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


class Squared(nn.Module):
    """A loss that has no labels to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x), y)


class Balanced(nn.Module):
    """A term of all samples, added to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.layer(x)
        return nn.functional.cross_entropy(y, labels) + y.softmax(-1).mean(0).square().sum()


def normed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Normed(), (torch.randn(8, 6), torch.randint(0, 4, (8,)))


def squared() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Squared(), (torch.randn(8, 6), torch.randn(8, 6))


def balanced() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Balanced(), (torch.randn(8, 6), torch.randint(0, 4, (8,)))


def test_no_padding_where_labels_are_read_otherwise() -> None:
    """A decoder would look the ignored label up."""
    assert padding_of(capture(spec("two"), {}, dynamic=(TWO,))) == {}


@pytest.mark.parametrize("name", ["normed", "squared", "balanced"])
def test_no_padding_where_samples_meet(name: str) -> None:
    assert padding_of(capture(f"{__file__}:{name}", {}, dynamic=("batch=4..32/4",))) == {}


@pytest.mark.parametrize(
    ("name", "build", "text", "label"),
    [("words", words, WORDS, "labels"), ("image", image, IMAGE, "labels")],
)
def test_padded_rows_change_nothing(name: str, build: object, text: str, label: str) -> None:
    """In float64, of the original model: the batch by itself, and with rows whose labels are ignored."""
    graph = capture(spec(name), {}, dynamic=(text,))
    assert padding_of(graph) == {"batch": {label: -100}}
    torch.manual_seed(0)
    model, inputs = build()  # type: ignore[operator]
    model = model.double().eval()
    given = [x.double() if x.is_floating_point() else x for x in inputs]
    padded = [torch.cat([x, x[:1].expand(3, *x.shape[1:])]) for x in given]
    padded[graph.inputs.index(label)][-3:] = -100
    found = []
    for batch in (given, padded):
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
