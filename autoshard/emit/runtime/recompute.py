"""Blocks that backward recomputes: only their inputs are kept, or results of their expensive operators too.

Random numbers are the same in both runs, as they depend on the step, the micro-batch and the operator alone.
Collectives run again, except those called with `kept=True`: see `kept_collectives`. None is ever on torch's list of
results to keep: they write into existing tensors, and the gradients would silently be wrong.
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
from .kept_products import FindingProducts, KeepingProducts

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
    """`block(*inputs)`, of which only the inputs are kept for backward; with `keep="expensive"` products and attention,
    too; with `keep=(0, 2, "attention")` these of its linear layers, counted as they run, and attention. In each case,
    results of collectives called with `kept=True` are kept too."""
    moment, results = random.moment, KeptResults()

    def run(*args: Tensor) -> Any:
        with _at(random, moment), results:
            return block(*args)

    contexts: dict[str, Callable[[], Any]] = {} if keep == "input" else {"context_fn": partial(_contexts, keep)}
    if keep == "expensive" and torch.compiler.is_compiling():  # which knows torch's own alone
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(keep: Keep) -> tuple[KeepingProducts, FindingProducts]:
    keeper = KeepingProducts(_Chosen(keep))
    return keeper, FindingProducts(keeper)


class _Chosen:
    """Selects the results of one call of a block to keep; its linear layers are counted as they run."""

    def __init__(self, keep: Keep) -> None:
        self.keep, self.met = keep, 0

    def __call__(self, op: Any) -> bool:
        if self.keep == "expensive":
            return op in KEPT
        if op in LINEAR:
            self.met += 1
            return self.met - 1 in self.keep
        return op in KEPT and "attention" in self.keep


@contextlib.contextmanager
def _at(random: Random, moment: Moment) -> Iterator[None]:
    """Restores the random state while recomputing: another micro-batch may have advanced it meanwhile."""
    before, random.moment = random.moment, moment
    try:
        yield
    finally:
        random.moment = before
