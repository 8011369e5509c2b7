# mypy: ignore-errors
# ruff: noqa: I001
"""Start of train.py, before its first step: what can't be is refused, batches begin where the run does."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from batches import UserError, loader_batches, local_shape, synthetic_batches
from dynamic_sizes import DYNAMIC_SIZES
from model_parallel import (
    DEVICES_PER_NODE,
    HAS_LOSS,
    INPUTS,
    MESH,
    MICRO_BATCHES,
    PACKED_BY,
    PLACE_INPUTS,
    PLAN,
    STAGES,
)
from packing import check_pack, first_label_counts, packed
from runtime import ParallelMesh, Prefetched, TrainingLog, node_name, sharding
from start_state import saved_loader


def make_log(options: argparse.Namespace, mesh: ParallelMesh) -> TrainingLog:
    try:
        return TrainingLog(mesh.global_rank, options.log_json, options.tensorboard)
    except ImportError as error:
        raise UserError(f"--tensorboard: {error}\n  try: pip install tensorboard, or --log-json FILE") from None


def check_run(options: argparse.Namespace, mesh: ParallelMesh) -> None:
    """UserError on what the package can't do."""
    if not HAS_LOSS and not options.dry_run:
        raise UserError(
            "this package was planned with --eval, or without a loss: there is nothing to train\n"
            "  try: README.md shows a program that calls the model; to train it, plan without --eval and with a loss"
        )
    if PACKED_BY and options.pack:
        check_pack()
    if options.profile and mesh.device.type == "npu":
        raise UserError(
            "--profile records with torch.profiler, which knows no Ascend\n  try: torch_npu.profiler, or msprof"
        )


def check_nodes(mesh: ParallelMesh) -> None:
    """Prints a warning, by rank 0, where groups of an axis are on several nodes that the plan has on one."""
    if mesh.device_mesh is None or dist.get_world_size() == 1:
        return
    ranks = dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"train/node/{mesh.global_rank}", node_name())
    if mesh.global_rank or PLACE_INPUTS:  # axes of one name are of other sizes elsewhere
        return
    nodes = [store.get(f"train/node/{rank}").decode() for rank in range(ranks)]
    sizes = {"stage": STAGES, **MESH} if STAGES > 1 else MESH
    stride = ranks
    for axis, size in sizes.items():
        outer, stride = stride, stride // size
        groups = [range(start + i, start + outer, stride) for start in range(0, ranks, outer) for i in range(stride)]
        if any(len({rank // DEVICES_PER_NODE for rank in group}) > 1 for group in groups):
            continue
        crossing = next((group for group in groups if len({nodes[rank] for rank in group}) > 1), None)
        if crossing is not None:
            where = ", ".join(f"{rank} on {nodes[rank]}" for rank in list(crossing)[:4])
            print(
                f"note: the axis {axis} crosses nodes (rank {where}), which the plan has within a node of"
                f" {DEVICES_PER_NODE} devices: its collectives take longer than predicted\n"
                f"  try: {min(DEVICES_PER_NODE, ranks)} processes on each node, in the order of the ranks",
                file=sys.stderr,
                flush=True,
            )


def set_matmul_precision(precision: str, device: torch.device) -> None:
    """Sets the precision of float32 products."""
    torch.set_float32_matmul_precision(precision)
    if device.type == "npu":  # torch_npu has a switch of its own, and does not read torch's
        torch.get_device_module(device).matmul.allow_hf32 = precision != "highest"


def packs(options: argparse.Namespace, model: nn.Module, mesh: ParallelMesh) -> Callable[..., Any] | None:
    """Function that makes batches of documents with --pack, once it is seen that `model` keeps them apart."""
    return partial(packed, first_counts=first_label_counts(model, mesh)) if options.pack else None


def training_batches(options: argparse.Namespace, mesh: ParallelMesh, done: int) -> Prefetched:
    """Batches from the step after `done` on."""
    start = done * MICRO_BATCHES
    if not options.data:
        batches = ((batch, None, 0) for batch in synthetic_batches(mesh, mesh.random.seed, start))
        return Prefetched(batches, mesh.device, 0)
    state = saved_loader(options.resume) if options.resume else None

    def saved_after(number: int) -> bool:  # a signal may end the run after any step
        return bool(options.save) and number % MICRO_BATCHES == 0

    reading = loader_batches(
        options.data, mesh, mesh.random.seed, start, state, saved_after,
        own_parts=options.own_parts if DYNAMIC_SIZES else False,
        pad=options.pad if DYNAMIC_SIZES else False, packs=options.packs if PACKED_BY else None,
    )  # fmt: skip
    return Prefetched(reading, mesh.device, options.prefetch)


def describe(model: nn.Module, mesh: ParallelMesh) -> None:
    """Prints what this rank holds; rank 0 calls it."""
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    whole = sum(math.prod(sharding(p).shape) for p in model.parameters())
    axes = ", ".join(f"{name}={n}" for name, n in mesh.axes.items())
    axes += f", stage 0 of {STAGES}," if STAGES > 1 else ""
    print(f"plan {PLAN}, mesh {axes} on {mesh.device.type}: {whole:,} parameters, {local:,} on rank 0", flush=True)
    for name in INPUTS:
        print(f"  input {name}: global {tuple(INPUTS[name][0])}, local {local_shape(name, mesh)}", flush=True)
