"""Attention whose queries (and keys and values) are sharded along the sequence, or whose heads share fewer key heads.

q is (..., heads, s, d), k (..., key heads, t, d), v (..., key heads, t, e); a mask is (..., s, t), with all columns.
`queries`: the axes that shard s; `keys`: those that shard t, each splitting what the previous one left (`rows` and
`columns` are the whole lengths). A causal mask uses global positions. `heads`: the axes that shard the heads of q, of
`query_heads`; k and v then hold all key heads, and each device selects those that its query heads use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import Axis, shard_bounds
from .redistribution import regather
from .weights import regather_before, regathering

if TYPE_CHECKING:
    from .randomness import Random


def held_range(size: int, axes: Sequence[Axis], at: Sequence[int] | None = None) -> tuple[int, int]:
    """[start, stop) of a dim on this device (or the one at `at`): each axis splits what the last one left."""
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
    """Attention of this device's queries to all keys, gathered over `keys` in one collective per axis.

    Only the shards of k and v are kept for backward, which gathers them again and scatters their gradients.
    """
    gathered = None
    if queries or keys or heads:
        k, v, mask, is_causal, enable_gqa, gathered = _prepared(
            k, v, mask, queries, keys, heads, rows, columns, query_heads, is_causal, enable_gqa
        )
    with regathering():
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return regather_before(out, *(gathered or ()))


def random_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, random: Random, *, queries: Sequence[Axis] = (),
    keys: Sequence[Axis] = (), heads: Sequence[Axis] = (), rows: int = 0, columns: int = 0, query_heads: int = 0,
    dropout_p: float, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, index: int,
    shape: Sequence[int], layout: str,
) -> Tensor:  # fmt: skip
    """`parallel_attention` with dropout on the probabilities. `shape` and `layout` are those of the scores."""
    dropout_p = dropout_p if random.training else 0.0
    gathered = None
    if queries or keys or heads:
        k, v, mask, is_causal, enable_gqa, gathered = _prepared(
            k, v, mask, queries, keys, heads, rows, columns, query_heads, is_causal, enable_gqa
        )
    with regathering():
        if random.exact or torch.compiler.is_compiling():
            if random.exact:
                keep = random.keep(index, shape, layout, dropout_p)[..., : k.shape[-2]]
            else:
                keep = random.bits(index, layout, (*q.shape[:-1], k.shape[-2])) >= int(dropout_p * 2**53)
            out = _spelt_out(q, k, v, mask, keep, p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        else:
            with random.fork(index, layout, default=True):
                out = F.scaled_dot_product_attention(
                    q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
    return regather_before(out, *(gathered or ()))


def _spelt_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor, *, p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Attention that keeps the probabilities where `keep` is true."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    hidden = (scores == -torch.inf).all(-1, keepdim=True)  # rows that see nothing give zeros
    weights = scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    return weights * keep / max(1 - p, 1e-30) @ v


def _prepared(
    k: Tensor, v: Tensor, mask: Tensor | None, queries: Sequence[Axis], keys: Sequence[Axis], heads: Sequence[Axis],
    rows: int, columns: int, query_heads: int, is_causal: bool, enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor | None, bool, bool, tuple[Tensor, ...]]:  # fmt: skip
    """All keys and values that this device's queries see, the causal mask in global positions, and the tensors that
    were gathered."""
    if heads:
        k, v, enable_gqa = local_heads(k, v, heads, query_heads, enable_gqa)
    gathered: tuple[Tensor, ...] = ()
    if keys:
        both = _gathered(torch.cat([k, v], -1), keys, columns)
        k, v = both.split([k.shape[-1], v.shape[-1]], -1)  # its backward joins the gradients in one copy
        gathered = (both,)
    if is_causal and queries:
        start, stop = held_range(rows, queries)
        seen = min(stop, k.shape[-2])  # nobody here looks further
        if seen < k.shape[-2]:
            k, v = k[..., :seen, :], v[..., :seen, :]
        mask, is_causal = causal_mask(start, stop, 0, seen, k.device), False
    return k, v, mask, is_causal, enable_gqa, gathered


def _gathered(x: Tensor, keys: Sequence[Axis], columns: int) -> Tensor:
    """The rows of all devices along `keys`. Only the shard is kept for backward."""
    for i in reversed(range(len(keys))):
        start, stop = held_range(columns, keys[:i])
        x = regather(x, keys[i], x.dim() - 2, size=stop - start)
    return x


def local_heads(
    k: Tensor, v: Tensor, heads: Sequence[Axis], query_heads: int, enable_gqa: bool
) -> tuple[Tensor, Tensor, bool]:
    """The key heads that this device's query heads use, and whether several of its query heads share one."""
    shared = query_heads // k.shape[-3]
    start, stop = held_range(query_heads, heads)
    first, last = start // shared, (stop - 1) // shared + 1
    if last - first == 1 or (start % shared == 0 and stop % shared == 0):
        return k.narrow(-3, first, last - first), v.narrow(-3, first, last - first), enable_gqa
    used = torch.arange(start, stop, device=k.device) // shared
    return k.index_select(-3, used), v.index_select(-3, used), False


def repeated_part(x: Tensor, *, repeats: int, dim: int, heads: Sequence[Axis]) -> Tensor:
    """This device's part, sharded by `heads`, of `x.repeat_interleave(repeats, dim)`."""
    start, stop = held_range(x.shape[dim] * repeats, heads)
    return x.index_select(dim, torch.arange(start, stop, device=x.device) // repeats)


def causal_mask(start: int, stop: int, first: int, last: int, device: torch.device) -> Tensor:
    """True where the query at row [start, stop) sees the key at column [first, last)."""
    return torch.arange(start, stop, device=device).unsqueeze(-1) >= torch.arange(first, last, device=device)
