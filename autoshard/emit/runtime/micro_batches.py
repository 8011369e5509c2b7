"""A step of several micro-batches: where each stands, and what share of a step's labels it has.

A mean over labels of which some are ignored is a mean over those of the whole step: what a micro-batch makes of its own
labels counts by their number. The losses of the micro-batches, so weighted, have the step's loss as their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .mesh import ParallelMesh

Counts = Sequence[tuple[Sequence[str], int]]  # of each loss: the axes that cut its labels, and the ignored label


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


@torch.no_grad()
def label_shares(mesh: ParallelMesh, labels: Sequence[Sequence[Tensor]], counts: Counts) -> list[list[Tensor]]:
    """`labels`: local ones, of each micro-batch and loss. One small all-reduce a loss for all micro-batches."""
    shares: list[list[Tensor]] = [[] for _ in labels]
    for loss, (axes, ignored) in enumerate(counts):
        counts_here = torch.stack([(given[loss] != ignored).sum() for given in labels])
        if axes:  # as integers: HCCL adds up no float64
            mesh.joint(axes).transport.all_reduce(counts_here)()
        own = counts_here.to(torch.float64)
        for given, share in zip(shares, own / own.mean(), strict=True):
            given.append(share)
    return shares
