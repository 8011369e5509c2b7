"""Blocks of experts in other forms than most: relu squared, weights (in, out), what was chosen in three dims."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Op
from autoshard.rules import Strategy
from tests.forced import check
from tests.slow import quick_at

E, M, F = 4, 6, 8


class Experts(torch.nn.Module):
    def __init__(self, gated: bool, activation: str, in_out: bool, dims: int) -> None:
        super().__init__()
        up, down = (M, F * (1 + gated)), (F, M)
        self.up = torch.nn.Parameter(torch.randn(E, *(up if in_out else up[::-1])))
        self.down = torch.nn.Parameter(torch.randn(E, *(down if in_out else down[::-1])))
        self.router = torch.nn.Linear(M, E)
        self.gated, self.activation, self.in_out, self.dims = gated, activation, in_out, dims

    def act(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation == "silu":
            return functional.silu(x)
        return (functional.relu(x) if self.activation == "relu2" else functional.silu(x)).square()

    def product(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.in_out:
            return torch.bmm(x.unsqueeze(1), weight).squeeze(1)
        return torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, M)
        weights, chosen = self.router(x if self.dims == 3 else rows).softmax(-1).topk(2)
        ids = chosen.reshape(-1)
        inner = self.product(self.up[ids], rows.repeat_interleave(2, 0))
        if self.gated:
            gate, inner = inner.chunk(2, -1)
            inner = self.act(gate) * inner
        else:
            inner = self.act(inner)
        output = self.product(self.down[ids], inner) * weights.reshape(-1).unsqueeze(-1)
        return output.view(len(rows), 2, M).sum(1).square().mean()


def build(
    gated: bool = False, activation: str = "silu", in_out: bool = False, dims: int = 2
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Experts(gated, activation, in_out, dims), (torch.randn(4, 3, M),)


FORMS = [
    {"activation": "relu2"}, {"activation": "relu2", "gated": True}, {"in_out": True},
    {"in_out": True, "gated": True}, {"dims": 3}, {"in_out": True, "gated": True, "dims": 3, "activation": "relu2"},
]  # fmt: skip


@pytest.mark.parametrize("form", quick_at(FORMS, 2, 4), ids=str)
def test_a_form_is_one_operator_and_cut_by_its_experts(form: dict[str, object]) -> None:
    graph = capture(f"{__file__}:build", form)
    (block,) = (op for op in graph.ops if op.target == "autoshard.experts")
    assert block.attribute("activation") == form.get("activation", "silu")
    gated = 1 + bool(form.get("gated"))
    shapes = [(12, M), (E, F * gated, M), (E, M, F), (12, 2), (12, 2)]
    assert [graph.tensor(name or "").shape for name in block.operands] == shapes

    def by_experts(op: Op, strategy: Strategy) -> bool:
        return op.target != "autoshard.experts" or "e" in {str(choice) for choice in strategy.choices}

    functions, largest = check(f"{__file__}:build", "tp=2", by_experts, (1,), form)
    assert "parallel_experts" in functions and largest < 1e-9


def test_another_square_is_no_block() -> None:
    graph = capture(f"{__file__}:build", {"activation": "squared silu"})
    assert not any(op.target == "autoshard.experts" for op in graph.ops)
