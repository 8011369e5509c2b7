"""Along which dynamic sizes batches may be padded: a padded batch then has the loss and gradients of what it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.errors import CaptureError
from autoshard.graph_capture.capture import capture
from autoshard.replay.padding import ignored_labels, padding_of
from tests import transformer_models
from tests.dynamic_models import image, spec, words
from tests.single.test_dynamic_capture import IMAGE, TWO, WORDS
from tests.slow import quick_at, slow


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
    assert padding_of(capture(spec("two"), {}, dynamic=(TWO,))) == ()


@pytest.mark.parametrize("name", quick_at(["normed", "squared", "balanced"], 1))
def test_no_padding_where_samples_meet(name: str) -> None:
    assert padding_of(capture(f"{__file__}:{name}", {}, dynamic=("batch=4..32/4",))) == ()


@pytest.mark.parametrize(
    ("name", "build", "text", "label"),
    quick_at([("words", words, WORDS, "labels"), ("image", image, IMAGE, "labels")], 0),
)
def test_padded_rows_change_nothing(name: str, build: object, text: str, label: str) -> None:
    """In float64, of the original model: the batch by itself, and with rows whose labels are ignored."""
    graph = capture(spec(name), {}, dynamic=(text,))
    assert "batch" in padding_of(graph) and ignored_labels(graph) == {label: -100}
    torch.manual_seed(0)
    model, inputs = build()  # type: ignore[operator]
    assert not changed(model, inputs, graph.inputs.index(label), 0)


def changed(model: nn.Module, inputs: Sequence[Tensor], label: int, dim: int, most: float = 1e-12) -> bool:
    """Does padding along `dim` change the loss or a gradient?"""
    model = model.double().eval()
    plain = [x.double() if x.is_floating_point() else x for x in inputs]
    padded = [torch.cat([x, x.narrow(dim, 0, 1).expand(*x.shape[:dim], 3, *x.shape[dim + 1 :])], dim) for x in plain]
    padded[label].narrow(dim, padded[label].shape[dim] - 3, 3).fill_(-100)
    results = []
    for batch in (plain, padded):
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    return not all(torch.allclose(one, other, rtol=0, atol=most) for one, other in zip(*results, strict=True))


# --- lengths ---

LENGTHS = "batch=4..32/4,length=8..64/4@0.1@1.1"
LONG = 12


def causal(x: Tensor, last: int | None = None) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]


def averaged(x: Tensor) -> Tensor:
    return x + x.mean(1, keepdim=True)


def both_ways(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def from_the_end(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1] - 1, -1, -1, dtype=x.dtype)[:, None]


def spread(x: Tensor) -> Tensor:
    return x + torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None]


MODELS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "causal": (causal, True),
    "summed up": (lambda x: x.cumsum(1), True),
    "behind": (lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], True),
    "numbered": (lambda x: x * torch.arange(x.shape[1])[:, None].to(x.dtype), True),
    "first": (lambda x: x + x[:, :1], True),
    "averaged": (averaged, False),
    "both ways": (both_ways, False),
    "by length": (lambda x: x * x.shape[1], False),
    "divided": (lambda x: x / x.shape[1], False),
    "last": (lambda x: x + x[:, -1:], False),
    "ahead": (lambda x: F.pad(x, (0, 0, 0, 1))[:, 1:], False),
    "turned": (lambda x: x.flip(1), False),
    "rolled": (lambda x: x.roll(1, 1), False),
    "from the end": (from_the_end, False),
    "spread": (spread, False),
    "soft": (lambda x: x * x.softmax(1), False),
    "by area": (lambda x: x * torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).sum(), False),
    "by count": (lambda x: x * torch.ones(x.shape[1], dtype=x.dtype).sum(), False),
    "convolved": (lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2), False),
}
LABELS: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], bool]] = {
    "as they are": (lambda x, y: (x, y), True),
    "shifted": (lambda x, y: (x[:, :-1], y[:, 1:]), True),
    "shifted with a label that does not count": (lambda x, y: (x, F.pad(y, (0, 1), value=-100)[:, 1:]), True),
    "all but the first": (lambda x, y: (x[:, 1:], y[:, 1:]), True),
    "the last left out": (lambda x, y: (x[:, 1:], y[:, :-1]), False),
    "with a label that counts": (lambda x, y: (x, F.pad(y, (0, 1), value=1)[:, 1:]), False),
}


class Positions(nn.Module):
    """`mixed` of positions, and which of them have which labels."""

    def __init__(self, mixed: str, paired: str) -> None:
        super().__init__()
        self.mixed, self.paired = MODELS[mixed][0], LABELS[paired][0]
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, y = self.paired(self.head(self.mixed(self.table(ids))), labels)
        return F.cross_entropy(x.reshape(-1, 7), y.reshape(-1))


def positions(mixed: str = "causal", paired: str = "shifted") -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    return Positions(mixed, paired), (torch.randint(0, 7, (4, LONG)), torch.randint(0, 7, (4, LONG)))


CASES = [(mixed, "as they are") for mixed in MODELS] + [("causal", paired) for paired in LABELS]


@pytest.mark.parametrize(("mixed", "paired"), quick_at(CASES, 3, 9, 21))
def test_lengths_are_padded_where_that_changes_nothing(mixed: str, paired: str) -> None:
    try:
        graph = capture(f"{__file__}:positions", {"mixed": mixed, "paired": paired}, dynamic=(LENGTHS,))
    except CaptureError:  # a constant of one length
        assert not MODELS[mixed][1]
        return
    padded = "length" in padding_of(graph)
    assert padded == (MODELS[mixed][1] and LABELS[paired][1])
    model, inputs = positions(mixed, paired)
    assert not (padded and changed(model, inputs, 1, 1))
    assert padded or changed(model, inputs, 1, 1), "a case that nothing changes shows nothing"


@pytest.mark.parametrize(("name", "found"), [slow("gpt2", True), slow("llama", True), ("bert", False)])
def test_lengths_of_transformers(name: str, found: bool) -> None:
    graph = capture(transformer_models.spec(name), {}, dynamic=("batch=4..32/4,sequence=8..16/8",))
    assert ("sequence" in padding_of(graph)) == found
    torch.manual_seed(0)
    model, inputs = getattr(transformer_models, name)()
    assert changed(model, inputs, graph.inputs.index("labels"), 1, 1e-6) != found  # the loss is in float32
