"""A step of several micro-batches on this rank: gradients of the mean of their losses, summed over devices once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from autoshard.api.boundary import whole_of
from autoshard.api.rank_model import RankModel
from autoshard.emit.runtime import gathered_together, label_shares, reducing, regathering

STEPS = count(1)  # forwards of this process: dropout differs in each, alike on all ranks


def step_gradients(made: RankModel, batches: Sequence[Sequence[Tensor]]) -> Tensor:
    """From the local inputs of each micro-batch, as a package's train.py does it. The mean loss, on every rank."""
    source, mesh, parameters = made.source, made.mesh, made.parameters()
    mesh.random.step = next(STEPS)
    shares: Sequence[Sequence[Tensor]] = [()] * len(batches)
    if len(batches) > 1:
        shares = _shares(made, batches)
    losses = []
    with reducing(mesh, parameters, made.buckets, len(batches)):
        for number, (inputs, own) in enumerate(zip(batches, shares, strict=True)):
            again = regathering() if source.GATHERS_AGAIN else contextlib.nullcontext()
            with mesh.micro_batch(number, own), gathered_together(mesh, parameters, source.WEIGHT_BUCKETS), again:
                result = made.module(*inputs)
                loss = result[0] if isinstance(result, tuple) else result
                (loss / len(batches)).backward()
            losses.append(loss.detach())
    name = made.program.loss
    assert name is not None
    return whole_of(torch.stack(losses).mean(0), (), str(made.program.value(name).layout), mesh)


def _shares(made: RankModel, batches: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Of each micro-batch, for each mean over labels: its share of the labels of the step."""
    labels = made.source.build_labels(made.mesh)
    given = [() if labels is None else labels(*inputs) for inputs in batches]
    every = [(one,) if isinstance(one, Tensor) else one for one in given]
    shares: list[list[Tensor]] = label_shares(made.mesh, every, made.source.LABEL_COUNTS)
    return shares
