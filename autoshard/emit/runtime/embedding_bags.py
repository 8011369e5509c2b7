"""Embedding bags with a table sharded by rows, or with sharded bags.

`vocabulary`: the axes that shard the rows of the table; `bags`: those that shard a list of bags, each splitting what
the previous one left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import Axis
from .operators import local_index, vocabulary_range


def parallel_embedding_bag(
    weight: Tensor, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None, *, size: int,
    mode: str, padding_idx: int | None = None,
    vocabulary: Sequence[Axis] = (), bags: Sequence[Axis] = (), parts: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """Weight (`size` rows, d), ids (bags, length) or (n) with offsets -> (bags, d): a partial sum over `vocabulary`,
    this device's bags over `bags`. `parts`: rows per device, if they are not equal."""
    if offsets is not None:
        offsets = F.pad(offsets, (0, 1), value=len(ids))
        if bags:
            ids, offsets, weights = _local_bags(ids, offsets, weights, bags)
    if not vocabulary:
        padding = _local(padding_idx, 0, size)
        return F.embedding_bag(
            ids, weight, offsets, mode=mode, per_sample_weights=weights,
            include_last_offset=offsets is not None, padding_idx=padding,
        )  # fmt: skip
    start, stop = vocabulary_range(vocabulary, size, parts)
    counts = _counts(ids, offsets, padding_idx) if mode == "mean" else None
    rows = _sum_here(weight, ids, offsets, weights, start, stop, size, _local(padding_idx, start, stop))
    return rows if counts is None else rows / counts.clamp(min=1).unsqueeze(1)


def _local_bags(
    ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: Sequence[Axis]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, offsets and weights of this device's bags; the offsets (one more than bags) count from the first."""
    first, last = vocabulary_range(bags, len(offsets) - 1)
    start, stop = offsets[[first, last]].tolist()
    return ids[start:stop], offsets[first : last + 1] - start, None if weights is None else weights[start:stop]


def _local(index: int | None, start: int, stop: int) -> int | None:
    return index - start if index is not None and start <= index < stop else None


def _counts(ids: Tensor, offsets: Tensor | None, padding_idx: int | None) -> Tensor:
    """Number of ids of each bag that are no padding, on whatever device their rows are."""
    counted = torch.ones_like(ids) if padding_idx is None else (ids != padding_idx).long()
    return counted.sum(1) if offsets is None else F.pad(counted.cumsum(0), (1, 0))[offsets].diff()


def _sum_here(
    weight: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, start: int, stop: int,
    size: int, padding_idx: int | None,
) -> Tensor:  # fmt: skip
    """Sums of the rows in [start, stop). An id of another device adds nothing; the first row stands in for it."""
    if start == stop:  # zeros that autograd still connects to all that has a gradient
        rows = weight.sum(0).expand(len(ids) if offsets is None else len(offsets) - 1, weight.shape[1])
        return rows if weights is None else rows + 0 * weights.sum()
    here, inside = local_index(ids, start, stop, size)
    counts = inside.to(weight.dtype) if weights is None else weights.masked_fill(~inside, 0)
    if padding_idx is not None:
        counts = counts.masked_fill(here == padding_idx, 0)
    return F.embedding_bag(
        here, weight, offsets, mode="sum", per_sample_weights=counts, include_last_offset=offsets is not None
    )
