"""What a search of whole steps leaves out of its space, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.errors import UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.joint.step_request_space import searched_step
from autoshard.rules.rebatch import rebatched
from autoshard.search.search_request import SearchRequest


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Small(), (torch.randn(4, 8),)


def test_a_micro_batch_that_the_model_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule may not fit one sample alone; others are searched."""

    def carried(graph: Graph, samples: int) -> Graph:
        if samples == 1:
            raise UsageError("index joins the batch with something else")
        return rebatched(graph, samples)

    monkeypatch.setattr("autoshard.joint.joint_search.rebatched", carried)
    wanted = SearchRequest(devices=1, step=StepRequest(global_batch=8, micro_batch="1,2"))
    found = searched_step(capture(f"{__file__}:build", {}), load_hardware("a100-80g-sxm"), wanted)
    assert found.best.problem.choice.micro_batch == 2
    assert ("micro-batches of 1: index joins the batch with something else", 1) in found.undivided
