"""How each parameter starts, watched on meta, against the numbers a real build gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoshard.graph_capture.constructor.initial_distributions import Init, InitWatcher


def start(make: Callable[[], torch.Tensor]) -> Init:
    watcher = InitWatcher()
    with torch.device("meta"), watcher:
        value = make()
    return watcher.init_of(value)


def with_padding() -> torch.Tensor:
    return nn.Embedding(9, 4, padding_idx=0).weight


def overwritten() -> torch.Tensor:
    value = torch.empty(100, 100)
    nn.init.ones_(value)
    return nn.init.normal_(value, 0.5, 2.0)


def copied() -> torch.Tensor:
    value = torch.empty(100, 100)
    value.copy_(torch.rand(100, 100) * 2 - 1)
    return value


CASES: list[tuple[Callable[[], torch.Tensor], Init]] = [
    (lambda: nn.LayerNorm(3).weight, ("constant", 1.0)),
    (lambda: nn.LayerNorm(3).bias, ("constant", 0.0)),
    (lambda: nn.Linear(100, 3).bias, ("uniform", -0.1, 0.1)),
    (lambda: nn.BatchNorm1d(3).running_var, ("constant", 1.0)),
    (with_padding, ("normal", 0.0, 1.0)),
    (overwritten, ("normal", 0.5, 2.0)),
    (copied, ("uniform", -1.0, 1.0)),
    (lambda: nn.Parameter(torch.zeros(3)), ("constant", 0.0)),
    (lambda: nn.Parameter(torch.full((3,), 0.25)), ("constant", 0.25)),
    (lambda: nn.Parameter(torch.randn(3, 4) * -0.02), ("normal", 0.0, 0.02)),
    (lambda: nn.Parameter(-0.5 * torch.rand(3) + 1), ("uniform", 0.5, 1.0)),
    (lambda: nn.init.trunc_normal_(torch.empty(3), 0.1, 0.02, -0.2, 0.3), ("trunc_normal", 0.1, 0.02, -0.2, 0.3)),
    (lambda: torch.empty(3), ()),
    (lambda: nn.init.orthogonal_(torch.empty(3, 3)), ()),
    (lambda: torch.randn(3).exp(), ()),
    (lambda: torch.randn(3) * torch.randn(3), ()),
]


@pytest.mark.parametrize("make, expected", CASES, ids=[str(i) for i in range(len(CASES))])
def test_start(make: Callable[[], torch.Tensor], expected: Init) -> None:
    init = start(make)
    assert init[:1] == expected[:1] and init[1:] == pytest.approx(expected[1:], abs=1e-12)


def test_memory_of_a_dead_tensor_is_not_taken_for_a_new_one() -> None:
    watcher = InitWatcher()
    with torch.device("meta"), watcher:
        for _ in range(100):
            assert watcher.init_of(torch.empty(5)) == ()
            torch.ones(5)
