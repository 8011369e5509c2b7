"""torch's flex_attention as attention with a dense mask: on a CPU it has no backward, and a trace holds no function of
indices. Block masks say which scores count; their `mask_mod`, asked of all indices at once, is that mask.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.source_lines import here

_FLEX = "torch.nn.attention.flex_attention"
_SDPA = "attn_mask=documents[:, None, :, None] == documents[:, None, None, :] of F.scaled_dot_product_attention"


@contextlib.contextmanager
def dense_flex_attention() -> Iterator[list[str]]:
    """Inside, every flex_attention, whatever it was imported or compiled as, is `dense_attention`. Gives a list that
    has the lines which called it."""
    flex: Any = sys.modules.get(_FLEX)
    _called.clear()
    if flex is None:
        yield _called
        return
    original: FunctionType = flex.flex_attention
    code = original.__code__
    original.__code__ = _instead.__code__
    try:
        with torch.compiler.set_stance("force_eager"):
            yield _called
    finally:
        original.__code__ = code


_called: list[str] = []


def _instead(  # type: ignore[no-untyped-def]  # its code stands in for torch's, whose globals it has
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # fmt: skip
    from autoshard.graph_capture.tracing.flex_attention import dense_attention

    return dense_attention(
        query, key, value, score_mod, block_mask, scale, enable_gqa, bool(return_lse or return_aux is not None)
    )


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    statistics: bool,
) -> torch.Tensor:
    """Compute flex_attention with a dense mask. CaptureError for what no operator of torch gives: its statistics, masks
    of blocks alone."""
    _called.append(here())
    if statistics:
        raise CaptureError(f"flex_attention returns its log-sum-exp or maxima at {here()}", "its result alone")
    indices = _indices(query, key)
    mask = _mask(block_mask, indices)
    if score_mod is None:
        whole = None if mask is None else mask.expand(*mask.shape[:-2], query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=whole, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = score_mod(scores, *indices)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = torch.softmax(scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores, -1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)  # a row without any is zero, not NaN
    return weights.to(value.dtype) @ value


def _indices(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Batch, head, query and key positions, each along a dim of its own."""
    sizes = query.shape[0], query.shape[1], query.shape[-2], key.shape[-2]
    shapes = [[-1 if dim == axis else 1 for dim in range(4)] for axis in range(4)]
    return tuple(torch.arange(size, device=query.device).view(shape) for size, shape in zip(sizes, shapes, strict=True))


def _mask(block_mask: Any, indices: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    if block_mask is None:
        return None
    flex: Any = sys.modules[_FLEX]
    if block_mask.mask_mod is flex.noop_mask:
        if block_mask.BLOCK_SIZE[0] == flex._LARGE_SPARSE_BLOCK_SIZE:
            return None
        message = f"a block mask of blocks alone, without a mask_mod, at {here()}"
        raise CaptureError(message, f"create_block_mask(mask_mod, …), or {_SDPA}")
    mask: torch.Tensor = block_mask.mask_mod(*indices)
    return mask
