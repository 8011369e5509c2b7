"""Blocks of which backward finds products, where torch's own operators write over what these gave."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from autoshard.emit.runtime import recomputed

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(6, 6), "gru": lambda: nn.GRU(6, 6), "rnn": lambda: nn.RNN(6, 6),
}  # fmt: skip


class Block(nn.Module):
    """`chunk` writes into views that have versions of their own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind, self.layer = nn.Linear(6, 12), kind, RECURRENT.get(kind, lambda: nn.Linear(6, 6))()

    def forward(self, x: Tensor) -> Tensor:
        gated = nn.functional.glu(self.first(x))
        if self.kind in RECURRENT:
            return cast(Tensor, self.layer(gated)[0])
        y = torch.mm(gated.flatten(0, 1), self.layer.weight)
        part = torch.ops.aten.unsafe_chunk(y, 2, 0)[0] if self.kind == "chunk" else y
        part = part.tanh_() if self.kind != "cummax" else torch.cummax(part, 0)[0]
        return part.square()


@pytest.mark.parametrize("keep", ["expensive", (0, 1)])
@pytest.mark.parametrize("kind", [*RECURRENT, "chunk", "in place", "cummax"])
def test_what_a_block_writes_over_is_made_again(kind: str, keep: str | tuple[int, ...]) -> None:
    torch.manual_seed(0)
    block, x = Block(kind), torch.randn(3, 4, 6)
    block(x).sum().backward()
    expected = [p.grad for p in block.parameters()]
    block.zero_grad()
    recomputed(block, cast(Any, SimpleNamespace(moment=None)), x.requires_grad_(), keep=keep).sum().backward()
    for one, p in zip(expected, block.parameters(), strict=True):
        torch.testing.assert_close(p.grad, one)
