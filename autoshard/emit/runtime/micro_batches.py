"""Micro-batches of a step: the position of each, and its share of a step's labels.

A mean over labels of which some are ignored is a mean over those of the whole step: a micro-batch's mean over its own
labels is weighted by their number. The mean of the weighted losses is the step's loss.

Devices of several kinds take unequal shares: each micro-batch is split into slices, one for each coordinate of an axis,
and a device computes a number of slices that matches its speed, one after another. Nothing is communicated over that
axis before the sums of gradients at the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .axis import Axis, held_indices
from .redistribution import reduced

if TYPE_CHECKING:
    from .mesh import ParallelMesh

# Of each loss: the axes that cut its labels, the ignored label, and the name of its class weights, "" without any.
Counts = Sequence[tuple[Sequence[str], int, str]]


class Slice(NamedTuple):
    """Micro-batch `number`, or its slice for the coordinate of an axis, `at`."""

    number: int
    inputs: Sequence[Tensor]
    at: tuple[str, int] | None = None


class BatchShares(NamedTuple):
    """`counts`: slices of a step that each device along `axis` computes. `inputs`: for each, the dim that is split into
    slices, whole as read, and the layout of a slice; None if every slice has the whole input."""

    axis: str
    counts: tuple[int, ...]
    inputs: Sequence[tuple[int, str] | None]

    def cut(self, inputs: Sequence[Tensor], coordinate: int, mesh: ParallelMesh) -> list[Tensor]:
        """Slice of a micro-batch, as read, for `coordinate`."""
        at, slices = mesh.coordinates | {self.axis: coordinate}, []
        for x, cut in zip(inputs, self.inputs, strict=True):
            if cut is not None:
                dim, layout = cut
                x = x.index_select(dim, held_indices(x.shape[dim], dim, layout, mesh, at).to(x.device))
            slices.append(x)
        return slices

    def local_slices(self, micro_batches: Sequence[Sequence[Tensor]], mesh: ParallelMesh) -> list[Slice]:
        """Slices of a step that this device computes."""
        here, size = mesh.coordinates[self.axis], mesh.axes[self.axis]
        first = sum(self.counts[:here])
        places = [divmod(first + n, size) for n in range(self.counts[here])]
        return [Slice(n, self.cut(micro_batches[n], at, mesh), (self.axis, at)) for n, at in places]


def slices_of(shares: BatchShares | None, micro_batches: Sequence[Sequence[Tensor]], mesh: ParallelMesh) -> list[Slice]:
    """Slices of a step that this device computes; without unequal shares, its part of every micro-batch."""
    if shares is not None:
        return shares.local_slices(micro_batches, mesh)
    return [Slice(number, inputs) for number, inputs in enumerate(micro_batches)]


def losses_of(results: Sequence[tuple[Tensor, ...]], slices: Sequence[Slice], micro_batches: int) -> list[Tensor]:
    """Local loss of each micro-batch: the sum over its slices here, zero without any."""
    losses = [torch.zeros((), device=results[0][0].device, dtype=results[0][0].dtype) for _ in range(micro_batches)]
    for outputs, piece in zip(results, slices, strict=True):
        losses[piece.number] = losses[piece.number] + outputs[0].detach()
    return losses


def counted_over(count: Tensor, rows: Sequence[Axis]) -> Tensor:
    """Sum over the axes that shard rows; for a slice, without the axis that slices, see `label_shares`."""
    for axis in rows:
        if axis.mesh.slice_at is None or axis.name != axis.mesh.slice_at[0]:
            count = reduced(count, axis)
    return count


class LabelShares:
    """Label shares of the running micro-batch, one per loss in turn: its labels over the micro-batches' mean."""

    def __init__(self) -> None:
        self._shares: Sequence[Tensor] = ()
        self._next = 0

    def begin(self, shares: Sequence[Tensor]) -> None:
        """Sets the shares of the next forward; without any, losses are means over their own labels."""
        self._shares, self._next = shares, 0

    def take(self) -> Tensor | None:
        if not self._shares:
            return None
        share, self._next = self._shares[self._next], self._next + 1
        return share


def counted(loss: Tensor, labels: LabelShares) -> Tensor:
    """Mean over this micro-batch's labels, weighted by their number. Without labels it is zero, not 0 / 0."""
    share = labels.take()
    if share is None:
        return loss
    return torch.where(share > 0, loss * share.to(loss.dtype), torch.zeros_like(loss))


def _amount(labels: Tensor, ignored: int, weights: Tensor | None) -> Tensor:
    """Number of labels that are not ignored, or the weights of their classes."""
    valid = labels != ignored
    return valid.sum() if weights is None else (weights[torch.where(valid, labels, 0)] * valid).sum()


@torch.no_grad()
def label_shares(
    mesh: ParallelMesh, labels: Sequence[Sequence[Tensor]], counts: Counts, weights: Mapping[str, Tensor],
    sliced: str = "", micro_batches: int = 0,
) -> list[list[Tensor]]:  # fmt: skip
    """`labels`: local ones, for each micro-batch and loss; `weights`: whole class weights, by name. Takes one small
    all-reduce per loss for all micro-batches.

    `sliced`: the axis along which devices compute slices of `micro_batches`, whose labels here these are; a slice's
    loss is a mean over its own labels."""
    shares: list[list[Tensor]] = [[] for _ in labels]
    for loss, (axes, ignored, name) in enumerate(counts):
        own_weights = weights[name] if name else None
        counts_here = torch.stack([_amount(batch[loss], ignored, own_weights) for batch in labels])
        others = [axis for axis in axes if axis != sliced]
        if others:  # as integers: HCCL adds up no float64
            mesh.joint(others).transport.all_reduce(counts_here)()
        amounts, total = counts_here.to(torch.float64), counts_here.sum()
        if sliced:
            mesh[sliced].transport.all_reduce(total)()
        mean = total.to(torch.float64) / micro_batches if sliced else amounts.mean()
        for row, share in zip(shares, amounts / mean, strict=True):
            row.append(share)
    return shares
