"""Ring attention: blocks of keys and values go round the devices, and none ever holds them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .attention import causal_mask, held_range, own_heads
from .axis import Axis


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, queries: Sequence[Axis], keys: Sequence[Axis],
    heads: Sequence[Axis] = (), rows: int, columns: int, query_heads: int = 0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Blocks of keys and values travel round `keys` while each device attends with its queries to the block it has.

    No device ever holds all keys, and a block moves while the one before it is used. Liu et al. 2023, arXiv:2310.01889.
    Causal masks skip blocks that no query here sees. There is no balancing: with contiguous shards over n devices the
    last one computes all n blocks and the first only one, so a step takes as long as without skipping, and what
    skipping saves is energy. Blocks go through torch's fused kernels on CPUs, and on CUDA in half precision; those with
    a mask, and other devices, make scores of (queries, block).
    """
    if heads:
        k, v, _ = own_heads(k, v, heads, query_heads, enable_gqa)
    shared = q.dim() > 2 and k.shape[-3] != q.shape[-3]
    if shared:  # (..., heads, s, d) to (..., key heads, heads for each, s, d)
        groups = (k.shape[-3], q.shape[-3] // k.shape[-3])
        q, k, v = q.unflatten(-3, groups), k.unsqueeze(-3), v.unsqueeze(-3)
        if mask is not None and mask.dim() > 2:
            mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, groups)
    ring = _Ring(keys, columns, held_range(rows, queries), is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
    out = cast(Tensor, _RingAttention.apply(q, k, v, mask, ring))
    return out.flatten(-4, -3) if shared else out


class _Ring:
    """The order in which the blocks of the ring come by: by shifts along the innermost axis, then the next one."""

    def __init__(self, keys: Sequence[Axis], columns: int, rows: tuple[int, int], causal: bool, scale: float) -> None:
        self.keys, self.columns, self.rows, self.causal, self.scale = keys, columns, rows, causal, scale
        self.steps = 1
        for axis in keys:
            self.steps *= axis.size

    def home(self) -> list[int]:
        return [axis.index for axis in self.keys]

    def block(self, owner: Sequence[int]) -> tuple[int, int]:
        """The columns of the block that came from the device at these coordinates."""
        return held_range(self.columns, self.keys, owner)

    def turns(self, step: int) -> int:
        """The position of the axis along which the blocks move after `step` (from 1)."""
        position = len(self.keys) - 1
        while step % self.keys[position].size == 0:
            step, position = step // self.keys[position].size, position - 1
        return position

    def seen(self, block: tuple[int, int]) -> bool:
        return not self.causal or block[0] < self.rows[1]

    def kernels(self, q: Tensor, v: Tensor, mask: Tensor | None) -> _Kernels:
        """torch's own where they take it: no mask but a causal one whose blocks are seen whole, half, or not at all."""
        aligned = not self.causal or self.rows == self.block(self.home())
        fast = q.device.type == "cpu" or (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16))
        fits = q.shape[-1] == v.shape[-1] and q.shape[-1] % (8 if q.is_cuda else 1) == 0 and q.shape[-1] <= 256
        return _Flash(self, q) if mask is None and aligned and fast and fits else _Plain(self, q, mask)


class _Kernels(Protocol):
    """What a device computes with one block: (queries, d) and (block, d) with the same dims before."""

    def forward(self, k: Tensor, v: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Its output (accumulated in float32) and the logarithms of the sums of its exponentials, (queries, 1)."""

    def backward(
        self, k: Tensor, v: Tensor, block: tuple[int, int], grad: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, from `out` and `logsumexp` of all blocks."""


class _Plain:
    """Scores as a tensor, computed again in backward."""

    def __init__(self, ring: _Ring, q: Tensor, mask: Tensor | None) -> None:
        self.ring, self.q, self.mask = ring, q, mask
        self.grad_mask: Tensor | None = None  # filled in backward where it is given

    def scores(self, k: Tensor, block: tuple[int, int]) -> Tensor:
        scores = (self.q @ k.transpose(-2, -1)).to(_accumulation(self.q.dtype)) * self.ring.scale
        if self.ring.causal and block[1] - 1 > self.ring.rows[0]:
            scores = scores.masked_fill(~causal_mask(*self.ring.rows, *block, k.device), -torch.inf)
        if self.mask is not None:
            own = self.mask[..., block[0] : block[1]]
            scores = scores.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else scores + own
        return scores

    def forward(self, k: Tensor, v: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        scores = self.scores(k, block)
        logsumexp = scores.logsumexp(-1, keepdim=True)
        weights = (scores - logsumexp.masked_fill(logsumexp == -torch.inf, 0)).exp_()  # a row may see nothing here
        return (weights.to(v.dtype) @ v).to(scores.dtype), logsumexp

    def backward(
        self, k: Tensor, v: Tensor, block: tuple[int, int], grad: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        seen = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)
        weights = (self.scores(k, block) - seen).exp_()
        grad_v = (weights.to(grad.dtype).transpose(-2, -1) @ grad).sum_to_size(v.shape)
        dots = (grad.to(weights.dtype) * out).sum(-1, keepdim=True)
        scores = weights * ((grad @ v.transpose(-2, -1)) - dots)
        if self.grad_mask is not None:
            part = self.grad_mask[..., block[0] : block[1]]
            part += scores.sum_to_size(part.shape)
        scores = (scores * self.ring.scale).to(self.q.dtype)
        return scores @ k, (scores.transpose(-2, -1) @ self.q).sum_to_size(k.shape), grad_v


class _Flash:
    """torch's fused kernels, which also give the logsumexp: the dims before (queries, d) as one, key heads repeated."""

    def __init__(self, ring: _Ring, q: Tensor) -> None:
        self.ring, self.shape = ring, q.shape
        self.q = self._heads(q)
        name = "_scaled_dot_product_flash_attention" + ("" if q.is_cuda else "_for_cpu")
        self.there, self.back = (getattr(torch.ops.aten, name + end).default for end in ("", "_backward"))

    def _heads(self, x: Tensor) -> Tensor:
        wide = x.expand(*self.shape[:-2], *x.shape[-2:])
        return wide.reshape(1, math.prod(self.shape[:-2]), *x.shape[-2:])

    def forward(self, k: Tensor, v: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        causal = self.ring.causal and block == self.ring.rows
        out, logsumexp, *_ = self.there(self.q, self._heads(k), self._heads(v), 0.0, causal, scale=self.ring.scale)
        wide = out.to(_accumulation(out.dtype)).reshape(*self.shape[:-1], v.shape[-1])
        return wide, logsumexp.reshape(*self.shape[:-1], 1).to(wide.dtype)

    def backward(
        self, k: Tensor, v: Tensor, block: tuple[int, int], grad: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal = self.ring.causal and block == self.ring.rows
        lengths: tuple[Any, ...] = ()
        state: tuple[Tensor, ...] = ()
        if self.q.is_cuda:  # no sequences of their own, and a state of the generator that without dropout nobody reads
            state = torch.empty(2, dtype=torch.uint64, device=k.device).unbind()
            lengths = None, None, self.q.shape[-2], k.shape[-2]
        given = (self._heads(grad), self.q, self._heads(k), self._heads(v), self._heads(out))
        sums = logsumexp.reshape(1, -1, self.q.shape[-2]).contiguous()
        grads = self.back(*given, sums, *lengths, 0.0, causal, *state, scale=self.ring.scale)
        return grads[0].reshape(self.shape), *(
            g.reshape(*self.shape[:-2], *x.shape[-2:]).sum_to_size(x.shape)
            for g, x in zip(grads[1:], (k, v), strict=True)
        )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: _Ring) -> Tensor:
        kernels, wide = ring.kernels(q, v, mask), _accumulation(q.dtype)
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=wide, device=q.device)
        logsumexp = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=wide, device=q.device)
        owner, moving = ring.home(), _packed(k, v)
        for step in range(1, ring.steps + 1):
            block = ring.block(owner)
            arriving = _pass_on(moving, ring, owner, step, _row(k, v)) if step < ring.steps else None
            if ring.seen(block):
                own, sums = kernels.forward(*_unpacked(moving, k, v, block), block)
                both = torch.logaddexp(logsumexp, sums)
                finite = both.masked_fill(both == -torch.inf, 0)  # a row that has seen nothing yet
                out = out * (logsumexp - finite).exp() + own * (sums - finite).exp()
                logsumexp = both
            moving = arriving() if arriving else moving
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, logsumexp)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, logsumexp = ctx.saved_tensors
        ring: _Ring = ctx.ring
        kernels, wide = ring.kernels(q, v, mask), _accumulation(q.dtype)
        grad_q, grad_mask = torch.zeros_like(q, dtype=wide), None
        if isinstance(kernels, _Plain) and mask is not None and ctx.needs_input_grad[3]:
            grad_mask = kernels.grad_mask = torch.zeros_like(mask, dtype=wide)
        owner, moving = ring.home(), _packed(k, v)
        sums = torch.zeros_like(moving, dtype=wide)  # of the gradients of the block that is here; they travel with it
        arriving_sums: Callable[[], Tensor] | None = None
        for step in range(1, ring.steps + 1):
            here, block = list(owner), ring.block(owner)
            arriving = _pass_on(moving, ring, owner, step, _row(k, v)) if step < ring.steps else None
            own = None
            if ring.seen(block):
                own = kernels.backward(*_unpacked(moving, k, v, block), block, grads[0], out, logsumexp)
            sums = arriving_sums() if arriving_sums else sums
            if own is not None:
                grad_q += own[0]
                for total, part in zip(_unpacked(sums, k, v, block), own[1:], strict=True):
                    total += part
            if arriving:
                arriving_sums = _pass_on(sums, ring, here, step, _row(k, v))
                moving = arriving()
        home = _sent_home(sums, ring, owner, _row(k, v))
        grad_k, grad_v = _unpacked(home, k, v, ring.block(ring.home()))
        mask_grad = None if grad_mask is None else grad_mask.to(mask.dtype)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), mask_grad, None


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _row(k: Tensor, v: Tensor) -> int:
    """How many numbers a block has for each of its columns."""
    return int(math.prod(k.shape[:-2]) * (k.shape[-1] + v.shape[-1]))


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """A block as one flat tensor: it moves in one piece."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(flat: Tensor, k: Tensor, v: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The keys and values of a block, as views."""
    shapes = [(*x.shape[:-2], block[1] - block[0], x.shape[-1]) for x in (k, v)]
    first, second = flat.split([math.prod(shape) for shape in shapes])
    return first.view(shapes[0]), second.view(shapes[1])


def _pass_on(flat: Tensor, ring: _Ring, owner: list[int], step: int, row: int) -> Callable[[], Tensor]:
    """Sends a block to the next device and receives the one before it, whose owner then stands in `owner`."""
    position = ring.turns(step)
    axis = ring.keys[position]
    owner[position] = (owner[position] - 1) % axis.size
    start, stop = ring.block(owner)
    return axis.transport.shift(flat, 1, row * (stop - start))


def _sent_home(flat: Tensor, ring: _Ring, owner: list[int], row: int) -> Tensor:
    """What belongs to the block of `owner` goes there; back comes what belongs to the block of this device."""
    for position, axis in enumerate(ring.keys):
        distance = (owner[position] - axis.index) % axis.size
        if distance:
            owner[position] = axis.index
            start, stop = ring.block(owner)
            flat = axis.transport.shift(flat, distance, row * (stop - start))()
    return flat
