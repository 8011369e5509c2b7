# mypy: ignore-errors
# ruff: noqa: I001
"""Start of a run: from a checkpoint, weights of the original model, or numbers drawn from the seed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batches import UserError
from initial import INITIAL
from model_parallel import BUFFERS, STAGES, UNEVEN
from runtime import (
    LossScaler,
    WeightFiles,
    assign,
    init_computed,
    init_parameter,
    init_parameters,
    load_checkpoint,
    load_full_state_dict,
    loader_state,
    saved_seed,
    sharding,
)


def last_checkpoint(folder: str) -> Path:
    """The folder itself, or its subfolder step-N with the largest N."""
    path = Path(folder)
    if (path / ".metadata").exists():
        return path
    steps = [p for p in path.glob("step-*") if p.name[5:].isdecimal() and (p / ".metadata").exists()]
    if not steps:
        raise UserError(f"--resume {folder}: there is no checkpoint here\n  try: a folder that --save wrote")
    return max(steps, key=lambda p: int(p.name[5:]))


def saved_loader(folder: str) -> Any:
    """The state of this rank's loader in a checkpoint."""
    try:
        return loader_state(last_checkpoint(folder))
    except ValueError as error:
        raise UserError(f"--resume {folder}: {error}") from None


def read_weights(path: str) -> Mapping[str, Any]:
    """Weights of a file or folder; of safetensors nothing is read yet, as each rank will read its part."""
    from convert import read_state_dict

    try:
        if Path(path).is_dir() or Path(path).suffix in (".safetensors", ".json"):
            return WeightFiles(path)
        return read_state_dict(path)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"--weights {path}: {error}") from None


def fill_unsaved(model: nn.Module, weights: Mapping[str, Any], seed: int) -> None:
    """Buffers that no state dict holds: from the weights file if it has them, else as the original model makes them."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    unknown = []
    for buffer in model.buffers():
        spec = sharding(buffer)
        if id(buffer) in saved:
            continue
        if spec.name in weights:
            assign(buffer, weights[spec.name])
        elif spec.name in INITIAL:
            init_computed(buffer, INITIAL[spec.name], seed)
        elif spec.init:
            init_parameter(buffer, spec.init, seed)
        else:
            unknown.append(spec.name)
    if unknown:
        raise UserError(
            f"the original model computes {', '.join(unknown)} in its constructor and does not save it\n"
            "  try: --weights with a state dict that has it too: {**model.state_dict(), **dict(model.named_buffers())}"
        )


def init_missing(model: nn.Module, weights: Mapping[str, Any], seed: int) -> None:
    """Initialises computed buffers of the state dict that a weights file may lack; parameters are read, not drawn."""
    for tensor in model.state_dict(keep_vars=True).values():
        spec = sharding(tensor)
        if (
            spec.name in INITIAL
            and not isinstance(tensor, nn.Parameter)
            and not {spec.name, *spec.ties} & weights.keys()
        ):
            init_computed(tensor, INITIAL[spec.name], seed)


def start_from(model: nn.Module, weights_path: str, seed: int = 0) -> Mapping[str, Any]:
    """Fills the model from weights of the original: a file of them, or a folder of .safetensors. Returns these."""
    weights = read_weights(weights_path)
    if BUFFERS:
        init_missing(model, weights, seed)
        fill_unsaved(model, weights, seed)
    try:
        load_full_state_dict(model, weights, INITIAL)
    except (KeyError, ValueError) as error:
        raise UserError(f"--weights {weights_path}: {error.args[0]}") from None
    return weights


def note_ignored(model: nn.Module, weights: Mapping[str, Any], weights_path: str) -> None:
    """Notes names in the file that the model does not have: a head outside the plan, or another model's weights."""
    held = [sharding(tensor) for tensor in (*model.parameters(), *model.buffers())]
    ignored = weights.keys() - INITIAL.keys() - {name for spec in held for name in (spec.name, *spec.ties)}
    if ignored and STAGES > 1:
        from convert import shardings  # those of other stages; imported where it is needed: it builds every stage

        ignored -= {name for spec, *_ in shardings().values() for name in (spec.name, *spec.ties)}
    if ignored:
        shown = ", ".join(sorted(ignored)[:3]) + (", ..." if len(ignored) > 3 else "")
        what = f"ignored {len(ignored)} that the model does not have: {shown}"
        print(f"note: --weights {weights_path}: {what}", flush=True)


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: argparse.Namespace,
    rank: int,
    scaler: LossScaler | None = None,
) -> int:
    """Fills the model from a checkpoint, a weights file, or by initialising; returns the steps done before."""
    if options.resume and options.seed is None:  # before what is drawn again, and where no weights say it
        with _not_resumable(last_checkpoint(options.resume)):
            options.seed = saved_seed(last_checkpoint(options.resume))
    seed = options.seed or 0
    if options.weights and not options.resume:
        weights = start_from(model, options.weights, seed)
        if rank == 0:
            note_ignored(model, weights, options.weights)
        return 0
    guessed = [] if options.resume else init_parameters(model, seed, INITIAL)
    if BUFFERS:
        weights = read_weights(options.weights) if options.weights else {}
        if options.weights:
            init_missing(model, weights, seed)
        fill_unsaved(model, weights, seed)
    if options.resume:
        folder = last_checkpoint(options.resume)
        with _not_resumable(folder):
            done = load_checkpoint(folder, model, optimizer, scaler, staged=STAGES > 1, uneven=UNEVEN)
        if rank == 0:
            print(f"resumed {folder} at step {done}", flush=True)
        return done
    if guessed and rank == 0:
        shown = ", ".join(guessed[:3]) + (", ..." if len(guessed) > 3 else "")
        print(
            f"note: {len(guessed)} parameters start from a guess, how the model makes them is unknown: {shown}",
            flush=True,
        )
    return 0


@contextlib.contextmanager
def _not_resumable(folder: str | Path) -> Iterator[None]:
    """Context that raises the faults of a checkpoint as UserError."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise UserError(f"--resume {folder}: {error.args[0]}") from None
    except OSError as error:
        raise UserError(f"--resume {folder}: {error}") from None
