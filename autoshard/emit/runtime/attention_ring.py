"""Ring attention: blocks of keys and values circulate among the devices; none ever holds all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .attention import held_range, local_heads
from .attention_ring_kernels import Flash, Kernels, Part, Plain, accumulation
from .axis import Axis
from .zigzag import Zigzag, exchange_rows


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, queries: Sequence[Axis], keys: Sequence[Axis],
    heads: Sequence[Axis] = (), rows: int, columns: int, query_heads: int = 0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention by blocks of keys and values that travel round `keys`; each device attends to the block it has.

    No device ever holds all keys, and a block moves while the one before it is used. Liu et al. 2023, arXiv:2310.01889.
    Causal masks skip blocks that no query here sees: with contiguous shards over n devices the last one computes all n
    blocks and the first only one, so a step takes as long as without skipping (`balanced_ring_attention` shares the
    work evenly). Blocks use torch's fused kernels on CPUs, and on CUDA in half precision; those with a mask, and other
    devices, compute scores of (queries, block).
    """
    if heads:
        k, v, _ = local_heads(k, v, heads, query_heads, enable_gqa)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _attend(q, k, v, mask, _Ring(keys, columns, held_range(rows, queries), is_causal, scale))


def balanced_ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: None = None, *, queries: Sequence[Axis], keys: Sequence[Axis],
    heads: Sequence[Axis] = (), rows: int, columns: int, query_heads: int = 0, is_causal: bool = True,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`ring_attention` under a causal mask, with the same work on every device: half of all blocks.

    The sequence is split into 2n chunks; device i gets the i-th and the i-th from the end, as in Megatron-Core and
    torchtitan, but for attention only: queries, keys and values are exchanged before it and the result after it, so
    that all else (positions, rotary tables, labels) stays in sequence order. `queries` are `keys`, `rows` `columns`.
    """
    if heads:
        k, v, _ = local_heads(k, v, heads, query_heads, enable_gqa)
    places = Zigzag(keys, columns)
    q, k, v = exchange_rows(places, True, q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = _attend(q, k, v, None, _BalancedRing(places, scale))
    return exchange_rows(places, False, out)[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: _Ring | _BalancedRing) -> Tensor:
    shared = q.dim() > 2 and k.shape[-3] != q.shape[-3]
    if shared:  # (..., heads, s, d) to (..., key heads, heads for each, s, d)
        groups = (k.shape[-3], q.shape[-3] // k.shape[-3])
        q, k, v = q.unflatten(-3, groups), k.unsqueeze(-3), v.unsqueeze(-3)
        if mask is not None and mask.dim() > 2:
            mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, groups)
    out = cast(Tensor, _RingAttention.apply(q, k, v, mask, ring))
    return out.flatten(-4, -3) if shared else out


class _Order:
    """The order in which blocks of the ring arrive: by shifts along the innermost axis, then the next one."""

    def __init__(self, keys: Sequence[Axis], scale: float) -> None:
        self.keys, self.scale, self.steps = keys, scale, math.prod(axis.size for axis in keys)

    def home(self) -> list[int]:
        return [axis.index for axis in self.keys]

    def turns(self, step: int) -> int:
        """Position of the axis along which the blocks move after `step` (from 1)."""
        position = len(self.keys) - 1
        while step % self.keys[position].size == 0:
            step, position = step // self.keys[position].size, position - 1
        return position


class _Ring(_Order):
    """Ring whose devices hold the sequence in order."""

    def __init__(self, keys: Sequence[Axis], columns: int, rows: tuple[int, int], causal: bool, scale: float) -> None:
        super().__init__(keys, scale)
        self.columns, self.rows, self.causal = columns, rows, causal

    def block(self, owner: Sequence[int]) -> tuple[int, int]:
        """Columns of the block that came from the device at these coordinates."""
        return held_range(self.columns, self.keys, owner)

    def length(self, owner: Sequence[int]) -> int:
        start, stop = self.block(owner)
        return stop - start

    def part(self, owner: Sequence[int]) -> Part | None:
        """All queries on all keys of the block, or None."""
        start, stop = self.block(owner)
        if self.causal and start >= self.rows[1]:
            return None
        shift = self.rows[0] - start if self.causal and stop - 1 > self.rows[0] else None
        return Part(0, stop - start, shift, start)

    def kernels(self, q: Tensor, v: Tensor, mask: Tensor | None) -> Kernels:
        """torch's fused kernels where they apply: no mask, or a causal one that shows blocks whole, half or not."""
        aligned = not self.causal or self.rows == self.block(self.home())
        return Flash(q, self.scale) if mask is None and aligned and Flash.takes(q, v) else Plain(q, self.scale, mask)


class _BalancedRing(_Order):
    """Ring whose devices each hold an early and a late chunk of the sequence."""

    def __init__(self, places: Zigzag, scale: float) -> None:
        super().__init__(places.axes, scale)
        self.places = places

    def length(self, owner: Sequence[int]) -> int:
        return sum(self.places.lengths(self.places.number(owner)))

    def part(self, owner: Sequence[int]) -> Part | None:
        """Part of a block that queries here see: an earlier device's early keys, seen by all queries; all keys of a
        later one, seen by the late queries. The device's own two chunks are in order, and half masked."""
        here, other = self.places.here, self.places.number(owner)
        early, late = self.places.lengths(other)
        if other == here:
            return Part(0, early + late, 0)
        part = Part(0, early) if other < here else Part(self.places.lengths(here)[0], early + late)
        empty = not part.columns or part.first_row == sum(self.places.lengths(here))
        return None if empty else part

    def kernels(self, q: Tensor, v: Tensor, mask: Tensor | None) -> Kernels:
        return Flash(q, self.scale) if Flash.takes(q, v) else Plain(q, self.scale, None)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: _Ring | _BalancedRing) -> Tensor:
        kernels, wide = ring.kernels(q, v, mask), accumulation(q.dtype)
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=wide, device=q.device)
        logsumexp = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=wide, device=q.device)
        owner, moving = ring.home(), _packed(k, v)
        for step in range(1, ring.steps + 1):
            part, length = ring.part(owner), ring.length(owner)
            arriving = _pass_on(moving, ring, owner, step, _row(k, v)) if step < ring.steps else None
            if part is not None:
                block_out, sums = kernels.forward(*_keys(_unpacked(moving, k, v, length), part), part)
                _join(out[..., part.first_row :, :], logsumexp[..., part.first_row :, :], block_out, sums)
            moving = arriving() if arriving else moving
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, logsumexp)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, logsumexp = ctx.saved_tensors
        ring: _Ring | _BalancedRing = ctx.ring
        kernels, wide, grad = ring.kernels(q, v, mask), accumulation(q.dtype), grads[0].contiguous()
        grad_q, grad_mask = torch.zeros_like(q, dtype=wide), None
        if isinstance(kernels, Plain) and mask is not None and ctx.needs_input_grad[3]:
            grad_mask = kernels.grad_mask = torch.zeros_like(mask, dtype=wide)
        owner, moving = ring.home(), _packed(k, v)
        sums = torch.zeros_like(moving, dtype=wide)  # of the gradients of the block that is here; they travel with it
        arriving_sums: Callable[[], Tensor] | None = None
        for step in range(1, ring.steps + 1):
            here, part, length = list(owner), ring.part(owner), ring.length(owner)
            arriving = _pass_on(moving, ring, owner, step, _row(k, v)) if step < ring.steps else None
            block_grads = None
            if part is not None:
                late = (x[..., part.first_row :, :] for x in (grad, out, logsumexp))
                block_grads = kernels.backward(*_keys(_unpacked(moving, k, v, length), part), part, *late)
            sums = arriving_sums() if arriving_sums else sums
            if part is not None and block_grads is not None:
                grad_q[..., part.first_row :, :] += block_grads[0]
                for total, added in zip(_keys(_unpacked(sums, k, v, length), part), block_grads[1:], strict=True):
                    total += added
            if arriving:
                arriving_sums = _pass_on(sums, ring, here, step, _row(k, v))
                moving = arriving()
        home = _sent_home(sums, ring, owner, _row(k, v))
        grad_k, grad_v = _unpacked(home, k, v, ring.length(ring.home()))
        mask_grad = None if grad_mask is None else grad_mask.to(mask.dtype)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), mask_grad, None


def _join(out: Tensor, logsumexp: Tensor, block_out: Tensor, sums: Tensor) -> None:
    """Adds one block's result in place: outputs are weighted by the sums of their exponentials."""
    both = torch.logaddexp(logsumexp, sums)
    finite = both.masked_fill(both == -torch.inf, 0)  # a row that has seen nothing yet
    out.mul_((logsumexp - finite).exp()).add_(block_out * (sums - finite).exp())
    logsumexp.copy_(both)


def _row(k: Tensor, v: Tensor) -> int:
    """Numbers per column of a block."""
    return int(math.prod(k.shape[:-2]) * (k.shape[-1] + v.shape[-1]))


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """A block as one flat tensor, so that it moves in one piece."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(flat: Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a block, as views."""
    shapes = [(*x.shape[:-2], length, x.shape[-1]) for x in (k, v)]
    first, second = flat.split([math.prod(shape) for shape in shapes])
    return first.view(shapes[0]), second.view(shapes[1])


def _keys(block: tuple[Tensor, Tensor], part: Part) -> tuple[Tensor, Tensor]:
    """Keys and values of a block that a device attends to, as views."""
    return block[0][..., : part.columns, :], block[1][..., : part.columns, :]


def _pass_on(flat: Tensor, ring: _Ring | _BalancedRing, owner: list[int], step: int, row: int) -> Callable[[], Tensor]:
    """Sends a block to the next device and receives the previous one's, whose owner is written to `owner`."""
    position = ring.turns(step)
    axis = ring.keys[position]
    owner[position] = (owner[position] - 1) % axis.size
    return axis.transport.shift(flat, 1, row * ring.length(owner))


def _sent_home(flat: Tensor, ring: _Ring | _BalancedRing, owner: list[int], row: int) -> Tensor:
    """Sends what belongs to `owner`'s block to that device, and returns what belongs to this device's block."""
    for position, axis in enumerate(ring.keys):
        distance = (owner[position] - axis.index) % axis.size
        if distance:
            owner[position] = axis.index
            flat = axis.transport.shift(flat, distance, row * ring.length(owner))()
    return flat
