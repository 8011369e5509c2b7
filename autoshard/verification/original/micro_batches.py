"""The original's step of several micro-batches, from the definition of a mean over labels, not from the package.

A loss that is a mean over the labels which are not ignored is, over a step, the mean over those of all micro-batches.
So each micro-batch runs twice: once to count, once for its gradients, with its mean weighted by its label count.
Means that the loss is not linear in have the weight 1: the step's loss is then the average of the micro-batches'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autoshard.graph_capture.tracing.call_caches import attributes_put_back
from autoshard.verification.original.random_draws import exact_dropout

_ATEN = torch.ops.aten
# loss -> the place of its labels, weights, reduction and ignored label among its arguments
_LOSSES: dict[Any, tuple[str, ...]] = {
    F.cross_entropy: ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    F.nll_loss: ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
}  # fmt: skip
_LOSSES |= {
    form: ("input", "target", "weight", "reduction", "ignore_index")
    for op in (_ATEN.cross_entropy_loss, _ATEN.nll_loss, _ATEN.nll_loss_nd, _ATEN.nll_loss2d)
    for form in (op, op.default)
}
Batch = Sequence[torch.Tensor]


class _LabelMeans(TorchFunctionMode):
    """Counts the labels of each mean, or the weights of their classes, in order; with `shares`, weights each mean by
    its share instead."""

    def __init__(self, shares: Sequence[float] | None = None) -> None:
        super().__init__()
        self.shares, self.counts = shares, list[float]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = _LOSSES.get(func)
        if names is None:
            return result
        arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
        target = arguments["target"]
        if arguments.get("reduction", "mean") not in ("mean", 1) or target.is_floating_point():
            return result
        counted, weights = target != arguments.get("ignore_index", -100), arguments.get("weight")
        weighted = counted if weights is None else weights[torch.where(counted, target, 0)] * counted
        self.counts.append(float(weighted.detach().sum()))
        if self.shares is None:
            return result
        share = self.shares[len(self.counts) - 1]
        return result * share if share else torch.zeros_like(result)


def label_shares(
    module: torch.nn.Module, batches: Sequence[Batch], seed: int, step: int, linear: Sequence[bool] = ()
) -> list[list[float]]:
    """Share of each mean over labels in each micro-batch: its labels by the mean number of all. Changes no buffer.

    `linear`: is the loss linear in each mean? Others have the share 1. One that the capture has left out, as nothing
    depends on it, is in no list."""
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    counts = []
    with attributes_put_back(module):  # buffers that a forward makes are gone with it
        for number, batch in enumerate(batches):
            with exact_dropout(seed, at(step, number)), _LabelMeans() as means:  # gradients are on: a hook asks
                module(*(x.clone() for x in batch))
            counts.append(means.counts)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            (buffer if buffer.grad_fn is None else buffer.detach_()).copy_(buffers[name])
    totals = [sum(column) / len(counts) for column in zip(*counts, strict=True)]
    weighted = linear if len(linear) == len(totals) else [all(linear)] * len(totals)
    return [
        [count / total if by_count else 1.0 for count, total, by_count in zip(counted, totals, weighted, strict=True)]
        for counted in counts
    ]


def sharing(shares: Sequence[float]) -> TorchFunctionMode:
    """Mode for the forward of a micro-batch with these shares."""
    return _LabelMeans(shares)


def at(step: int, number: int) -> Any:
    """Key of the random numbers of micro-batch `number`."""
    return (step, number) if number else step
