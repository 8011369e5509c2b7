"""LSTM, GRU and plain cells with sharded hidden units.

A device has the rows of its units in each gate's block of the weights, reads the whole of the last hidden state, and
returns its part of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from .axis import Axis
from .operators import vocabulary_range


def parallel_lstm_cell(
    x: Tensor, h: Tensor, c: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None, b_h: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """LSTM: x (batch, inputs), h (batch, all units), c (batch, own units), weights (4 own units, ...) -> h and c of own
    units. Gates: input, forget, cell, output."""
    i, f, g, o = (F.linear(x, w_x, b_x) + F.linear(h, w_h, b_h)).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def parallel_gru_cell(
    x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None, b_h: Tensor | None = None, *,
    size: int, units: Sequence[Axis],
) -> Tensor:  # fmt: skip
    """GRU: x (batch, inputs), h (batch, `size` units), weights (3 own units, ...) -> h of own units. Gates: reset,
    update, new. `units`: the axes that shard the units, each splitting what the previous one left."""
    reset, update, new = F.linear(x, w_x, b_x).chunk(3, 1)
    last_reset, last_update, last_new = F.linear(h, w_h, b_h).chunk(3, 1)
    candidate = (new + (reset + last_reset).sigmoid() * last_new).tanh()
    start, stop = vocabulary_range(units, size)
    return candidate + (update + last_update).sigmoid() * (h[:, start:stop] - candidate)


def parallel_rnn_cell(
    x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor | None = None, b_h: Tensor | None = None, *,
    activation: str,
) -> Tensor:  # fmt: skip
    """x (batch, inputs), h (batch, all units), weights (own units, ...) -> h of own units. `activation`: tanh, relu."""
    preact = F.linear(x, w_x, b_x) + F.linear(h, w_h, b_h)
    return preact.tanh() if activation == "tanh" else preact.relu()
