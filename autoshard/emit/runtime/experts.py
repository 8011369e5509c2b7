"""Experts: each pair of a token and an expert chosen for it is computed where that expert is.

`cut`: the axes that shard the experts, each splitting what the previous one left. Those also in `dispatch` shard the
tokens too: pairs travel to their expert's device and back. Along the others every device has all tokens, computes the
pairs of its own experts, and the result is a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
_GROUPED = (torch.bfloat16, torch.float16, torch.float32)  # what torch's grouped product takes
Undo = Callable[[Tensor], Tensor]


class _Send(torch.autograd.Function):
    """Sends rows to other devices along one axis; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, send: list[int], receive: list[int]) -> Tensor:
        ctx.options = axis, send, receive
        return axis.transport.all_to_all(rows.contiguous(), send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, send, receive = ctx.options
        return axis.transport.all_to_all(grads[0].contiguous(), receive, send), None, None, None


def _dispatch(rows: Tensor, ids: Tensor, owner: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Undo]:
    """Sends rows and their experts' ids to the experts' devices; also returns the function that sends results back."""
    order = owner.argsort(stable=True)
    counts = torch.bincount(owner, minlength=axis.size)
    ones = [1] * axis.size
    send, receive = torch.stack((counts, axis.transport.all_to_all(counts, ones, ones))).tolist()  # one wait
    there = cast(Tensor, _Send.apply(rows[order], axis, send, receive))
    chosen = axis.transport.all_to_all(ids[order].contiguous(), send, receive)

    def undo(y: Tensor) -> Tensor:
        return cast(Tensor, _Send.apply(y, axis, receive, send))[order.argsort()]

    return there, chosen, undo


def _keep(rows: Tensor, ids: Tensor, owner: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Undo]:
    """Rows whose experts are here; the returned function puts zeros in place of the others."""
    count, here = len(rows), (owner == axis.index).nonzero().squeeze(1)
    return rows[here], ids[here], lambda y: y.new_zeros((count, y.shape[1])).index_copy(0, here, y)


Product = Callable[[Tensor, Tensor], Tensor]
Apply = Callable[
    ..., Tensor
]  # a product, rows, and one expert's weights (or all of them, if the product groups) -> rows


def _plain(activation: str, gated: bool) -> Apply:
    act = _ACTIVATIONS[activation]

    def apply(product: Product, rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inner = product(rows, up.mT)
        if gated:
            gate, inner = inner.chunk(2, -1)
            return product(act(gate) * inner, down.mT)
        return product(act(inner), down.mT)

    return apply


def _clipped(limit: float, alpha: float) -> Apply:
    """Gated experts whose gate and up columns alternate, both clamped to at most `limit`."""

    def apply(product: Product, rows: Tensor, up: Tensor, down: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
        inner = product(rows, up) + up_bias
        gate, inner = inner[:, ::2].clamp(max=limit), inner[:, 1::2].clamp(-limit, limit)
        inner = (inner + 1) * (gate * torch.sigmoid(gate * alpha))
        return product(inner.to(down.dtype), down) + down_bias

    return apply


def _knows_groups(device: str) -> bool:
    """Can kernels group experts? Above compute capability 9, idle ones get garbage gradients (pytorch 172439)."""
    if not hasattr(F, "grouped_mm") or torch.version.hip is not None:  # torch before 2.10; AMD's was never tried
        return False
    return device == "cpu" or (device == "cuda" and torch.cuda.get_device_capability()[0] <= 9)


def _can_group(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Can one kernel compute all experts' products? It needs one supported dtype, and rows of 16-byte multiples."""
    if torch.compiler.is_compiling():  # where a view begins is not known then
        return False
    same = all(w.dtype == rows.dtype for w in weights)
    if not same or rows.dtype not in _GROUPED or not _knows_groups(rows.device.type):
        return False
    if rows.dtype == torch.float32 and torch.is_autocast_enabled(rows.device.type):
        return False  # which knows this kernel not, and would leave it in float32
    steps = (n for w in weights[:2] for n in (*w.shape[1:], w.storage_offset(), *(s for s in w.stride() if s != 1)))
    return all(step * rows.itemsize % 16 == 0 for step in steps)


def _each(rows: Tensor, ids: Tensor, weights: Sequence[Tensor], apply: Apply) -> Tensor:
    """Passes every row through its expert; `ids` count from the first expert here."""
    order = ids.argsort(stable=True)
    rows = rows[order]
    counts = (ids[:, None] == torch.arange(len(weights[0]), device=ids.device)).sum(0)
    if _can_group(rows, weights):  # counts stay on the device: the host does not wait for them
        product = partial(F.grouped_mm, offs=counts.cumsum(0, dtype=torch.int32))
        biases = [bias.repeat_interleave(counts, 0, output_size=len(rows)) for bias in weights[2:]]
        return apply(product, rows, *weights[:2], *biases)[order.argsort()]
    parts = rows.split(counts.tolist())
    outputs = [
        apply(torch.matmul, part, *params) for part, *params in zip(parts, *(w.unbind() for w in weights), strict=True)
    ]
    return torch.cat(outputs)[order.argsort()]


def parallel_experts(
    x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, experts: int, activation: str, gated: bool = True, limit: float = 0.0,
    alpha: float = 0.0, cut: Sequence[Axis] = (), dispatch: Sequence[Axis] = (),
) -> Tensor:  # fmt: skip
    """Experts of a layer: x (t, m), up (e, 2f, m) or (e, f, m), down (e, n, f), chosen and weights (t, k) -> (t, n).

    With biases (e, 2f) and (e, n): up (e, m, 2f), down (e, f, n), and a clipped gate between.
    """
    params = [up, down] if up_bias is None or down_bias is None else [up, down, up_bias, down_bias]
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
    y = _each(rows, ids - start, params, apply)
    for undo in reversed(back):
        y = undo(y)
    return (y * weights.reshape(-1, 1)).unflatten(0, (-1, count)).sum(1).to(x.dtype)


def dispatched_experts(*operands: Tensor, cut: Sequence[Axis], dispatch: Sequence[Axis], **options: Any) -> Tensor:
    """`parallel_experts` with tokens that travel (along `dispatch`)."""
    return parallel_experts(*operands, **options, cut=cut, dispatch=dispatch)
