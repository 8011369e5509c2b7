# mypy: ignore-errors
# ruff: noqa: I001
"""The loss of batches that are not trained on: what the original model computes after `model.eval()`.

It is the forward of training without dropout. Where the model does something else besides when it does not train,
EVALUATION in model_parallel.py says so, and --eval-data is refused.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import model_parallel
from batches import UserError, load_function, loader_batches
from dynamic_sizes import BUCKETS, DYNAMIC_SIZES, module_of, step_sizes
from model_parallel import (
    BATCH_SHARES,
    EVALUATION,
    LOSS_AXES,
    LOSS_PART,
    PACKED_BY,
    PART_STAGES,
    STAGES,
    UPDATES_BUFFERS,
    WEIGHT_BUCKETS,
)
from pipelines import pipeline_of
from runtime import ParallelMesh, Prefetched, gathered_together, sharding, start_loss_sum

_PLANNED_FOR_IT = (
    "a package planned with --eval, whose README.md shows how to call it, with weights made of this one's checkpoints"
)


def check_evaluation(options: argparse.Namespace) -> None:
    """UserError where --eval-data is given and this package can't evaluate, or it is no function."""
    if options.eval_data and (reason := no_evaluation()):
        raise UserError(f"--eval-data: {reason}")
    if options.eval_data:
        load_function(options.eval_data, "--eval-data")


def no_evaluation() -> str:
    """Reason why this package does not evaluate, and what to try; "" where it does."""
    if UPDATES_BUFFERS:
        return f"this model's forward in training updates buffers, as batch norm does\n  try: {_PLANNED_FOR_IT}"
    return f"{EVALUATION}\n  try: {_PLANNED_FOR_IT}" if EVALUATION else ""


def evaluates(options: argparse.Namespace, step: int) -> bool:
    last = step == options.steps
    return bool(options.eval_data) and (last or bool(options.eval_every and step % options.eval_every == 0))


@torch.no_grad()
def evaluate(model: nn.Module, mesh: ParallelMesh, options: argparse.Namespace) -> float:
    """The mean loss of the first batches of --eval-data; of all, where these are fewer."""
    reading = loader_batches(
        options.eval_data, mesh, 0, 0, option="--eval-data", once=True,
        own_parts=options.own_parts if DYNAMIC_SIZES else False,
        pad=options.pad if DYNAMIC_SIZES else False, packs=options.packs if PACKED_BY else None,
    )  # fmt: skip
    batches = Prefetched(reading, mesh.device, 0)
    losses = []
    for _ in range(options.eval_batches):
        batch = next(batches, None)
        if ends_anywhere(mesh, batch is None):
            break
        losses.append(evaluated(model, mesh, batch)[0])
    if not losses:
        raise UserError(f"--eval-data {options.eval_data}: a loader yields no batch")
    return whole_loss(torch.stack(losses).mean(0), mesh)


@torch.no_grad()
def evaluated(model: nn.Module, mesh: ParallelMesh, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Local outputs of local inputs, the loss first; with stages the loss alone, zero where it is not made."""
    if STAGES > 1:
        return (staged_loss(model, mesh, inputs),)
    if BATCH_SHARES is not None:  # equal ones
        inputs = BATCH_SHARES.cut(inputs, mesh.coordinates[BATCH_SHARES.axis], mesh)
    source = module_of([inputs], mesh) if BUCKETS else model_parallel
    weights = contextlib.nullcontext()
    if source.WEIGHT_BUCKETS:
        parameters = {sharding(parameter).name: parameter for parameter in model.parameters()}
        weights = gathered_together(mesh, parameters, source.WEIGHT_BUCKETS)
    mesh.random.training = False
    try:
        with weights:
            result = model(*inputs)
    finally:
        mesh.random.training = True
    return result if isinstance(result, tuple) else (result,)


def staged_loss(model: nn.Module, mesh: ParallelMesh, inputs: Sequence[Tensor]) -> Tensor:
    """Loss from the forwards of all stages or places."""
    places = pipeline_of(model, mesh)
    buckets = [bucket for number in mesh.stages.parts for bucket in WEIGHT_BUCKETS[number]]
    mesh.random.training = False
    try:
        with gathered_together(mesh, {sharding(weight).name: weight for weight in model.parameters()}, buckets):
            losses = places.evaluate(inputs, next(iter(step_sizes([inputs], mesh)), None))
    finally:
        mesh.random.training = True
    return losses[0] if losses else torch.zeros((), device=mesh.device)


def whole_loss(loss: Tensor, mesh: ParallelMesh) -> float:
    """The loss of the global batch, from the partial sum of each rank."""
    whole = start_loss_sum(mesh, loss, LOSS_AXES)()
    if mesh.stages is None:
        return float(whole)
    here = torch.full((1,), float(whole) if PART_STAGES[LOSS_PART] == mesh.stages.index else 0.0, device=mesh.device)
    return float(mesh.stages.all_reduce(here))


def ends_anywhere(mesh: ParallelMesh, here: bool) -> bool:
    """True on all ranks if one has no more batches: all stop together."""
    ended = torch.tensor(float(here), device=mesh.device)
    mesh.joint(tuple(mesh.axes)).transport.all_reduce(ended, "max")()
    return bool(ended)
