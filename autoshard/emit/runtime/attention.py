"""Attention whose queries (and keys and values) are cut along the sequence, or whose heads share fewer key heads.

q is (..., heads, s, d), k (..., key heads, t, d), v (..., key heads, t, e); a mask is (..., s, t), its columns whole.
`queries`: the axes that cut s; `keys`: those that cut t, each what the one before left (`rows` and `columns` are the
whole lengths). A causal mask counts global positions. `heads`: the axes that cut the heads of q, of `query_heads`;
k and v then hold all of theirs, and each device takes what its own query heads use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .axis import Axis, GroupTransport, shard_bounds
from .redistribution import all_gather

if TYPE_CHECKING:
    from .randomness import Random


def held_range(size: int, axes: Sequence[Axis], at: Sequence[int] | None = None) -> tuple[int, int]:
    """[start, stop) of a dim on this device (or the one at coordinates `at`): each axis cuts what the last one left."""
    start, stop = 0, size
    for axis, index in zip(axes, at or [axis.index for axis in axes], strict=True):
        low, high = shard_bounds(stop - start, axis, index=index)
        start, stop = start + low, start + high
    return start, stop


def parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, queries: Sequence[Axis] = (),
    keys: Sequence[Axis] = (), heads: Sequence[Axis] = (), rows: int = 0, columns: int = 0, query_heads: int = 0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Every device attends with its queries to all keys, gathered over `keys` in one collective an axis.

    Only the shards of k and v are kept for backward, which gathers them again and scatters their gradients.
    """
    k, v, mask, is_causal, enable_gqa, hooks = _prepared(
        k, v, mask, queries, keys, heads, rows, columns, query_heads, is_causal, enable_gqa
    )
    with hooks:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def random_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, random: Random, *, queries: Sequence[Axis] = (),
    keys: Sequence[Axis] = (), heads: Sequence[Axis] = (), rows: int = 0, columns: int = 0, query_heads: int = 0,
    dropout_p: float, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, index: int,
    shape: Sequence[int], layout: str,
) -> Tensor:  # fmt: skip
    """`parallel_attention` with dropout on the probabilities. `shape` and `layout` are those of the scores."""
    k, v, mask, is_causal, enable_gqa, hooks = _prepared(
        k, v, mask, queries, keys, heads, rows, columns, query_heads, is_causal, enable_gqa
    )
    if not random.exact:
        with random.fork(index, layout), hooks:
            return F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    hidden = (scores == -torch.inf).all(-1, keepdim=True)  # rows that see nothing give zeros
    weights = scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    keep = random.keep(index, shape, layout, dropout_p)[..., : k.shape[-2]]
    return weights * keep / max(1 - dropout_p, 1e-30) @ v


_Hooks = AbstractContextManager[object]


def _prepared(
    k: Tensor, v: Tensor, mask: Tensor | None, queries: Sequence[Axis], keys: Sequence[Axis], heads: Sequence[Axis],
    rows: int, columns: int, query_heads: int, is_causal: bool, enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor | None, bool, bool, _Hooks]:  # fmt: skip
    """All keys and values that this device's queries see, with the causal mask in global positions, and what keeps
    autograd from saving them whole."""
    if heads:
        k, v, enable_gqa = _own_heads(k, v, heads, query_heads, enable_gqa)
    hooks: _Hooks = nullcontext()
    if keys:
        gathered = _Gathered(k, v, keys, columns)
        (k, v), hooks = gathered.whole(), gathered.hooks()
    if is_causal and queries:
        start, stop = held_range(rows, queries)
        seen = min(stop, k.shape[-2])  # nobody here looks further
        k, v, mask, is_causal = k[..., :seen, :], v[..., :seen, :], _causal(start, stop, 0, seen, k.device), False
    return k, v, mask, is_causal, enable_gqa, hooks


def _own_heads(
    k: Tensor, v: Tensor, heads: Sequence[Axis], query_heads: int, enable_gqa: bool
) -> tuple[Tensor, Tensor, bool]:
    """The key heads that the query heads of this device use, and whether several of these share one."""
    shared = query_heads // k.shape[-3]
    start, stop = held_range(query_heads, heads)
    first, last = start // shared, (stop - 1) // shared + 1
    if last - first == 1 or (start % shared == 0 and stop % shared == 0):
        return k.narrow(-3, first, last - first), v.narrow(-3, first, last - first), enable_gqa
    used = torch.arange(start, stop, device=k.device) // shared
    return k.index_select(-3, used), v.index_select(-3, used), False


def _causal(start: int, stop: int, first: int, last: int, device: torch.device) -> Tensor:
    """True where the query at a row [start, stop) sees the key at a column [first, last)."""
    return torch.arange(start, stop, device=device).unsqueeze(-1) >= torch.arange(first, last, device=device)


class _Gathered:
    """Keys and values side by side, gathered. Under `hooks`, what autograd saves of them is gathered anew for use."""

    def __init__(self, k: Tensor, v: Tensor, keys: Sequence[Axis], columns: int) -> None:
        self.shard, self.width, self.keys, self.columns = torch.cat([k, v], -1), k.shape[-1], keys, columns
        self.packed = self.unpacked = 0
        self.again: Tensor | None = None

    def gather(self, x: Tensor) -> Tensor:
        for i in reversed(range(len(self.keys))):
            start, stop = held_range(self.columns, self.keys[:i])
            x = all_gather(x, self.keys[i], x.dim() - 2, size=stop - start, grad="reduce_scatter")
        return x

    def whole(self) -> tuple[Tensor, Tensor]:
        kv = self.gather(self.shard)
        self.pointer = kv.untyped_storage().data_ptr()
        self.shard = self.shard.detach()
        return kv[..., : self.width], kv[..., self.width :]

    def hooks(self) -> _Hooks:
        return cast(Any, torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))

    def _pack(self, x: Tensor) -> Any:
        if x.untyped_storage().data_ptr() != self.pointer:
            return x
        self.packed += 1
        return x.shape, x.stride(), x.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.again is None:
            with torch.no_grad():
                self.again = self.gather(self.shard)
        whole, self.unpacked = self.again, self.unpacked + 1
        if self.unpacked % self.packed == 0:  # the last of this backward
            self.again = None
        return whole.as_strided(*packed)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, queries: Sequence[Axis], keys: Sequence[Axis],
    heads: Sequence[Axis] = (), rows: int, columns: int, query_heads: int = 0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Blocks of keys and values travel round `keys` while each device attends with its queries to the block it has.

    No device ever holds all keys, and a block moves while the one before it is used. Liu et al. 2023, arXiv:2310.01889.
    Causal masks skip blocks that no query here sees. There is no balancing: with contiguous shards over n devices the
    last one computes all n blocks and the first only one, so a step takes as long as without skipping, and what
    skipping saves is energy.
    """
    if heads:
        k, v, _ = _own_heads(k, v, heads, query_heads, enable_gqa)
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

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None, block: tuple[int, int]) -> Tensor:
        scores = (q @ k.transpose(-2, -1)).to(_accumulation(q.dtype)) * self.scale
        if self.causal and block[1] - 1 > self.rows[0]:
            scores = scores.masked_fill(~_causal(*self.rows, *block, q.device), -torch.inf)
        if mask is not None:
            own = mask[..., block[0] : block[1]]
            scores = scores.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else scores + own
        return scores


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: _Ring) -> Tensor:
        wide = _accumulation(q.dtype)
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=wide, device=q.device)
        largest = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=wide, device=q.device)
        total = torch.zeros_like(largest)
        owner, moving = ring.home(), _packed(k, v)
        for step in range(1, ring.steps + 1):
            block = ring.block(owner)
            arriving = _pass_on(moving, ring, owner, step, _row(k, v)) if step < ring.steps else None
            if ring.seen(block):
                key, value = _unpacked(moving, k, v, block)
                scores = ring.scores(q, key, mask, block)
                new = torch.maximum(largest, scores.amax(-1, keepdim=True))
                finite = new.masked_fill(new == -torch.inf, 0)  # a row that has seen nothing yet
                weights, kept = (scores - finite).exp_(), (largest - finite).exp()
                total = total * kept + weights.sum(-1, keepdim=True)
                out = out * kept + weights.to(value.dtype) @ value
                largest = new
            moving = arriving() if arriving else moving
        out = (out / total.masked_fill(total == 0, 1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, largest + total.log())
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, logsumexp = ctx.saved_tensors
        ring: _Ring = ctx.ring
        grad, wide = grads[0], _accumulation(q.dtype)
        hidden = logsumexp == -torch.inf
        dots = (grad.to(wide) * out).sum(-1, keepdim=True)
        grad_q, grad_mask = torch.zeros_like(q, dtype=wide), None
        if mask is not None and ctx.needs_input_grad[3]:
            grad_mask = torch.zeros_like(mask, dtype=wide)
        owner, moving = ring.home(), _packed(k, v)
        sums = torch.zeros_like(moving, dtype=wide)  # of the gradients of the block that is here; they travel with it
        arriving_sums: Callable[[], Tensor] | None = None
        for step in range(1, ring.steps + 1):
            here, block = list(owner), ring.block(owner)
            arriving = _pass_on(moving, ring, owner, step, _row(k, v)) if step < ring.steps else None
            own_k = own_v = None
            if ring.seen(block):
                key, value = _unpacked(moving, k, v, block)
                weights = (ring.scores(q, key, mask, block) - logsumexp).exp_().masked_fill_(hidden, 0)
                own_v = (weights.to(grad.dtype).transpose(-2, -1) @ grad).sum_to_size(value.shape)
                scores = weights * ((grad @ value.transpose(-2, -1)) - dots)
                if grad_mask is not None:
                    part = grad_mask[..., block[0] : block[1]]
                    part += scores.sum_to_size(part.shape)
                scores = (scores * ring.scale).to(q.dtype)
                grad_q += scores @ key
                own_k = (scores.transpose(-2, -1) @ q).sum_to_size(key.shape)
            sums = arriving_sums() if arriving_sums else sums
            if own_k is not None and own_v is not None:
                sum_k, sum_v = _unpacked(sums, k, v, block)
                sum_k += own_k
                sum_v += own_v
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
    return math.prod(k.shape[:-2]) * (k.shape[-1] + v.shape[-1])


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
    return _shift(flat, axis, 1, row * (stop - start))


def _sent_home(flat: Tensor, ring: _Ring, owner: list[int], row: int) -> Tensor:
    """What belongs to the block of `owner` goes there; back comes what belongs to the block of this device."""
    for position, axis in enumerate(ring.keys):
        distance = (owner[position] - axis.index) % axis.size
        if distance:
            owner[position] = axis.index
            start, stop = ring.block(owner)
            flat = _shift(flat, axis, distance, row * (stop - start))()
    return flat


def _shift(x: Tensor, axis: Axis, distance: int, length: int) -> Callable[[], Tensor]:
    """Sends `x` that many devices on and receives `length` numbers; they are there once the result was called."""
    to, source = (axis.index + distance) % axis.size, (axis.index - distance) % axis.size
    if not isinstance(axis.transport, GroupTransport):
        send, receive = [0] * axis.size, [0] * axis.size
        send[to], receive[source] = len(x), length
        moved = axis.transport.all_to_all(x, send, receive)
        return lambda: moved
    group, received = axis.transport.group or dist.group.WORLD, x.new_empty(length)
    ranks = dist.get_process_group_ranks(group)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, ranks[to], group), dist.P2POp(dist.irecv, received, ranks[source], group)]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait
