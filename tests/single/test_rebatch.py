"""A captured graph at another batch is, byte for byte, what capturing at that batch gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.errors import UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph_json import dumps
from autoshard.rules.rebatch import rebatched
from tests.models import NAMES, missing_library


@pytest.mark.parametrize("name", ["t5", "swin", "vae", "small_resnet"])
def test_the_graph_at_another_batch_is_the_one_captured_there(name: str) -> None:
    if missing_library(name):
        pytest.skip(f"{missing_library(name)} is not installed")
    made, larger = (capture(NAMES[name], {"batch": batch}, "bf16-mixed") for batch in (4, 6))
    samples = larger.tensor(larger.inputs[0]).shape[0]
    assert dumps(rebatched(made, samples)) == dumps(larger)
    assert dumps(rebatched(larger, made.tensor(made.inputs[0]).shape[0])) == dumps(made)


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
