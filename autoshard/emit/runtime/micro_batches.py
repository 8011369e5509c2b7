"""A step of several micro-batches: where each stands, and what share of a step's labels it has.

A mean over labels of which some are ignored is a mean over those of the whole step: what a micro-batch makes of its own
labels counts by their number. The losses of the micro-batches, so weighted, have the step's loss as their mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .mesh import ParallelMesh

# Of each loss: the axes that cut its labels, the ignored label, and the name of its class weights, "" without any.
Counts = Sequence[tuple[Sequence[str], int, str]]


class LabelShares:
    """Of the micro-batch that runs, for each of its losses in turn: its labels by the mean of all micro-batches."""

    def __init__(self) -> None:
        self._shares: Sequence[Tensor] = ()
        self._next = 0

    def begin(self, shares: Sequence[Tensor]) -> None:
        """Of the next forward; without any, losses are means over their own labels."""
        self._shares, self._next = shares, 0

    def take(self) -> Tensor | None:
        if not self._shares:
            return None
        share, self._next = self._shares[self._next], self._next + 1
        return share


def counted(loss: Tensor, labels: LabelShares) -> Tensor:
    """A mean over the labels of this micro-batch that counts by their number. Without labels it is zero, not 0 / 0."""
    share = labels.take()
    if share is None:
        return loss
    return torch.where(share > 0, loss * share.to(loss.dtype), torch.zeros_like(loss))


def _amount(labels: Tensor, ignored: int, weights: Tensor | None) -> Tensor:
    """How many labels count, or the weights of their classes."""
    kept = labels != ignored
    return kept.sum() if weights is None else (weights[torch.where(kept, labels, 0)] * kept).sum()


@torch.no_grad()
def label_shares(
    mesh: ParallelMesh, labels: Sequence[Sequence[Tensor]], counts: Counts, weights: Mapping[str, Tensor]
) -> list[list[Tensor]]:
    """`labels`: local ones, of each micro-batch and loss; `weights`: whole ones, of classes, by name. One small
    all-reduce a loss for all micro-batches."""
    shares: list[list[Tensor]] = [[] for _ in labels]
    for loss, (axes, ignored, name) in enumerate(counts):
        own_weights = weights[name] if name else None
        counts_here = torch.stack([_amount(given[loss], ignored, own_weights) for given in labels])
        if axes:  # as integers: HCCL adds up no float64
            mesh.joint(axes).transport.all_reduce(counts_here)()
        own = counts_here.to(torch.float64)
        for given, share in zip(shares, own / own.mean(), strict=True):
            given.append(share)
    return shares
