"""Experts: each pair of a token and an expert that was chosen for it is worked on where that expert is.

`cut`: the axes that cut the experts, each what the one before left. Along those of them in `dispatch` the tokens are
cut too: pairs travel to the device of their expert and back. Along the others every device has all tokens, works on the
pairs of its own experts, and the result is a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import Axis, shard_bounds

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
}
Undo = Callable[[Tensor], Tensor]


class _Send(torch.autograd.Function):
    """Rows to other devices along one axis; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
        ctx.options = axis, send, receive
        return axis.transport.all_to_all(rows.contiguous(), send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, send, receive = ctx.options
        return axis.transport.all_to_all(grads[0].contiguous(), receive, send), None, None, None


def _dispatch(rows: Tensor, ids: Tensor, owner: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Undo]:
    """Rows and their experts at the devices that own these, and the way back."""
    order = owner.argsort(stable=True)
    counts = torch.bincount(owner, minlength=axis.size)
    ones = [1] * axis.size
    send, receive = counts.tolist(), axis.transport.all_to_all(counts, ones, ones).tolist()
    there = cast(Tensor, _Send.apply(rows[order], axis, send, receive))
    chosen = axis.transport.all_to_all(ids[order].contiguous(), send, receive)

    def undo(y: Tensor) -> Tensor:
        return cast(Tensor, _Send.apply(y, axis, receive, send))[order.argsort()]

    return there, chosen, undo


def _keep(rows: Tensor, ids: Tensor, owner: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Undo]:
    """The rows whose experts are here; zeros for the others on the way back."""
    count, here = len(rows), (owner == axis.index).nonzero().squeeze(1)
    return rows[here], ids[here], lambda y: y.new_zeros((count, y.shape[1])).index_copy(0, here, y)


Apply = Callable[..., Tensor]  # rows of one expert, its weights -> rows


def _plain(activation: str, gated: bool) -> Apply:
    act = _ACTIVATIONS[activation]

    def apply(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inner = F.linear(rows, up)
        if gated:
            gate, inner = inner.chunk(2, -1)
            return F.linear(act(gate) * inner, down)
        return F.linear(act(inner), down)

    return apply


def _clipped(limit: float, alpha: float) -> Apply:
    """Gate and up alternate, both at most `limit`."""

    def apply(rows: Tensor, up: Tensor, down: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
        inner = rows @ up + up_bias
        gate, inner = inner[:, ::2].clamp(max=limit), inner[:, 1::2].clamp(-limit, limit)
        inner = (inner + 1) * (gate * torch.sigmoid(gate * alpha))
        return inner.to(down.dtype) @ down + down_bias

    return apply


def _each(rows: Tensor, ids: Tensor, weights: Sequence[Tensor], apply: Apply) -> Tensor:
    """Every row through its expert; `ids` count from the first expert here."""
    order = ids.argsort(stable=True)
    experts = torch.arange(len(weights[0]), device=ids.device)
    parts = rows[order].split((ids[:, None] == experts).sum(0).tolist())
    made = [apply(part, *own) for part, *own in zip(parts, *(w.unbind() for w in weights), strict=True)]
    return torch.cat(made)[order.argsort()]


def parallel_experts(
    x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, experts: int, activation: str, gated: bool = True, limit: float = 0.0,
    alpha: float = 0.0, cut: Sequence[Axis] = (), dispatch: Sequence[Axis] = (),
) -> Tensor:  # fmt: skip
    """x (t, m), up (e, 2f, m) or (e, f, m), down (e, n, f), chosen and weights (t, k) -> (t, n).

    With biases (e, 2f) and (e, n): up (e, m, 2f), down (e, f, n), and a clipped gate between.
    """
    own = [up, down] if up_bias is None or down_bias is None else [up, down, up_bias, down_bias]
    apply = _clipped(limit, alpha) if activation == "clipped" else _plain(activation, gated)
    count = chosen.shape[1]
    rows, ids = x.repeat_interleave(count, 0), chosen.reshape(-1)
    start, stop, back = 0, experts, []
    for axis in cut:
        owner = (ids - start) // max(-(-(stop - start) // axis.size), 1)
        move = _dispatch if axis in dispatch else _keep
        rows, ids, undo = move(rows, ids, owner, axis)
        back.append(undo)
        low, high = shard_bounds(stop - start, axis)
        start, stop = start + low, start + high
    y = _each(rows, ids - start, own, apply)
    for undo in reversed(back):
        y = undo(y)
    return (y * weights.reshape(-1, 1)).unflatten(0, (-1, count)).sum(1).to(x.dtype)


def dispatched_experts(*operands: Tensor, cut: Sequence[Axis], dispatch: Sequence[Axis], **options: Any) -> Tensor:
    """The same where tokens travel (along `dispatch`)."""
    return parallel_experts(*operands, **options, cut=cut, dispatch=dispatch)
