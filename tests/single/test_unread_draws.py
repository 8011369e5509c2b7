"""Random numbers that no operator of the program draws: they don't move the others, in proofs either."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoshard.graph_capture.capture import capture
from autoshard.ir.graph_json import dumps, loads
from autoshard.verification.original.random_draws import ExactDropout, exact_dropout
from tests.forced import check
from tests.slow import quick_at


class Model(nn.Module):
    """Of what it drops first, nothing depends; `late`: a layer is made by the first forward, with numbers drawn."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(8, 8), late
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.late:
            linear = nn.Linear(8, 8)
            linear.weight, linear.bias = self.layer.weight, self.layer.bias
            self.layer, self.late = linear, False
        hidden = self.first(x)
        functional.dropout(hidden.relu(), 0.5)
        hidden = functional.dropout(hidden, 0.25)
        torch.rand_like(hidden)
        return functional.dropout(self.layer(hidden), 0.5).square().mean()


def build(late: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Model(late), (torch.randn(8, 8),)


def test_a_graph_knows_which_draws_nothing_reads() -> None:
    graph = capture(f"{__file__}:build", {})
    assert graph.unread_draws == (0, 2)
    assert sum(op.target == "aten.dropout" for op in graph.ops) == 2
    assert loads(dumps(graph)).unread_draws == (0, 2)


@pytest.mark.parametrize("late", quick_at([False, True], 1))
def test_a_package_is_proved_all_the_same(late: bool) -> None:
    variants, largest = check(f"{__file__}:build", "dp=2", lambda *_: True, (1,), {"late": late})
    assert "random_dropout" in variants and largest < 1e-9


def test_the_others_are_numbered_without_them() -> None:
    x = torch.ones(64)
    with exact_dropout(1, 0):
        plain = [functional.dropout(x, 0.5) for _ in range(2)]
    with ExactDropout(1, 0, (0, 2)):
        drawn = [functional.dropout(x, 0.5) for _ in range(4)]
    assert torch.equal(drawn[1], plain[0]) and torch.equal(drawn[3], plain[1])
    assert not torch.equal(drawn[0], plain[0]) and not torch.equal(drawn[2], plain[1])
