"""A captured graph at another batch is, byte for byte, what capturing at that batch gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.errors import UsageError
from autoshard.graph_capture.capture import capture, capture_model
from autoshard.ir.graph_json import dumps
from autoshard.rules.resize.rebatch import rebatched
from autoshard.whole_step_search.joint_plan import literal_count_notes, other_averages
from tests.models import NAMES, missing_library
from tests.slow import slow


@pytest.mark.parametrize("name", [slow("t5"), slow("swin"), slow("vae"), "small_resnet", slow("gemma3")])
def test_the_graph_at_another_batch_is_the_one_captured_there(name: str) -> None:
    if missing_library(name):
        pytest.skip(f"{missing_library(name)} is not installed")
    smaller, larger = (capture(NAMES[name], {"batch": batch}, "bf16-mixed") for batch in (4, 6))
    samples = larger.tensor(larger.inputs[0]).shape[0]
    assert dumps(rebatched(smaller, samples)) == dumps(larger)
    assert dumps(rebatched(larger, smaller.tensor(smaller.inputs[0]).shape[0])) == dumps(smaller)


class Mixed(nn.Module):
    """Its linear runs along the batch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.mix = nn.Linear(batch, batch)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.t()).t().square().mean()


def mixed(batch: int = 4) -> tuple[nn.Module, tuple[Tensor]]:
    return Mixed(batch), (torch.randn(batch, 3),)


def test_a_batch_that_is_a_size_of_the_model_is_refused() -> None:
    graph = capture(f"{__name__}:mixed", {"batch": 4})
    with pytest.raises(UsageError, match=r"mix\.(weight|bias) has the size of the batch"):
        rebatched(graph, 8)


def test_one_sample_hides_its_batch() -> None:
    graph = capture(f"{__name__}:mixed", {"batch": 1})
    with pytest.raises(UsageError, match="one sample"):
        rebatched(graph, 8)


class Towers(nn.Module):
    """Each sample against the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.item = nn.Linear(6, 5), nn.Linear(7, 5)

    def forward(self, query: Tensor, item: Tensor) -> Tensor:
        scores = self.query(query) @ self.item(item).t()
        return nn.functional.cross_entropy(scores, torch.arange(len(query), device=query.device))


def towers(batch: int = 4) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Towers(), (torch.randn(batch, 6), torch.randn(batch, 7))


def test_samples_that_are_compared_with_each_other_stay_together() -> None:
    graph = capture(f"{__name__}:towers", {"batch": 4})
    assert rebatched(graph, 4) is graph
    with pytest.raises(UsageError, match="compares the samples of a batch with each other"):
        rebatched(graph, 8)


class Picking(nn.Module):
    """Each sample's last word, by the numbers of samples; or by numbers that are as many by chance."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(3, 3), count

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        x = self.layer(x)
        if not self.count:
            return x[torch.arange(len(x)), last].square().sum()
        return x[torch.arange(self.count)].square().sum() + last.sum()


def picking(batch: int = 4, count: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Picking(count), (torch.randn(batch, 5, 3), torch.full((batch,), 2))


def test_samples_that_are_picked_by_their_numbers_are_followed() -> None:
    smaller, larger = (capture(f"{__name__}:picking", {"batch": batch}) for batch in (4, 6))
    assert dumps(rebatched(smaller, 6)) == dumps(larger)


def test_the_first_samples_are_not_all_of_them() -> None:
    graph = capture(f"{__name__}:picking", {"count": 4})
    with pytest.raises(UsageError, match="joins the batch with something else"):
        rebatched(graph, 8)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def normalised() -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Mean()), (torch.randn(8, 3),)


def test_batch_norm_over_fewer_samples_is_told() -> None:
    graph = capture_model(*normalised(), training=True)
    assert other_averages(graph, 8) == []
    assert "1 batch norm of 4 samples together, where the model was captured with 8" in other_averages(graph, 4)[0]
    assert other_averages(capture_model(*normalised(), training=False), 4) == []


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) / 2).square().sum() / len(x)


def test_a_number_that_python_counted_is_told() -> None:
    """No rule says that it is the batch: without the model's code it stays, and the plan says so."""
    graph = capture_model(Counted(), (torch.randn(4, 3),))
    (note,) = literal_count_notes(graph, 8)
    assert "of 4 samples, planned with 8" in note and "these may be such: 4 of div at " in note and "2 of" not in note
    assert literal_count_notes(graph, 4) == []
