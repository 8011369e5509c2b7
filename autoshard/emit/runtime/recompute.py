"""Blocks that backward computes again: only their inputs are kept, or results of their expensive operators too.

Random numbers are those of the first time, for they depend on the step, the micro-batch and the operator alone.
Collectives run again, but for those that are called with `kept=True`: see `kept_collectives`. None is ever on torch's
list of results to keep: they write into tensors that are there, and the gradients would silently be wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .kept_collectives import KeptResults

if TYPE_CHECKING:
    from .randomness import Moment, Random

_EXPENSIVE = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm",  # of experts, `_grouped_mm` runs again
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
KEPT = frozenset(getattr(torch.ops.aten, name).default for name in _EXPENSIVE if hasattr(torch.ops.aten, name))


LINEAR = frozenset((torch.ops.aten.mm.default, torch.ops.aten.addmm.default))
Keep = str | tuple[int | str, ...]


def recomputed(block: nn.Module, random: Random, *inputs: Tensor, keep: Keep = "input") -> Any:
    """`block(*inputs)`, of which backward finds the inputs; with `keep="expensive"` products and attention, too; with
    `keep=(0, 2, "attention")` of its linear layers, counted as they run, those, and attention. With any of these what
    collectives gave that are called with `kept=True`."""
    moment, results = random.moment, KeptResults()

    def run(*given: Tensor) -> Any:
        with _at(random, moment), results:
            return block(*given)

    contexts: dict[str, Callable[[], Any]] = {}
    if keep == "expensive":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    elif keep != "input":
        contexts["context_fn"] = lambda: create_selective_checkpoint_contexts(_Some(keep))
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Some:
    """The policy of one call: its linear layers are counted, in forward and again in backward."""

    def __init__(self, keep: Keep) -> None:
        self.keep, self.met = keep, {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op in KEPT and "attention" in self.keep
        if op in LINEAR:
            kept = self.met[context.is_recompute] in self.keep
            self.met[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _at(random: Random, moment: Moment) -> Iterator[None]:
    """In the backward of one micro-batch another may be running forward."""
    before, random.moment = random.moment, moment
    try:
        yield
    finally:
        random.moment = before
