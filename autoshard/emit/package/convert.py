# mypy: ignore-errors
# ruff: noqa: I001
"""Weights between the original model and this package; one process, no torchrun.

    python convert.py --to-sharded model.safetensors checkpoint/        then: train.py --resume checkpoint/
    python convert.py --to-original checkpoints/step-100 model.safetensors
    python convert.py --to-original checkpoints model.safetensors       the last whole one there

Weight files are .safetensors, .pt or .bin (a state dict with the original names and shapes).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import shutil
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from initial import INITIAL
from model_parallel import MESH, MESHES, PART_STAGES, STAGES, build_model
from runtime import (
    ParallelMesh,
    Sharding,
    Stages,
    fault_of,
    load_tensors,
    newest_whole,
    put_in_place,
    read_index,
    sharding,
    step_folders,
)


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """A state dict from .safetensors, .pt or .bin. ValueError on another kind of file, or one that can't be read."""
    path = Path(path)
    if path.suffix not in (".safetensors", ".pt", ".pth", ".bin"):
        raise ValueError(f"expected .safetensors, .pt or .bin, got {path.name!r}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file")
    unreadable: tuple[type[Exception], ...] = (RuntimeError, EOFError, pickle.UnpicklingError)
    try:
        if path.suffix == ".safetensors":
            unreadable = (_safetensors().SafetensorError,)
            return dict(_safetensors().torch.load_file(path))
        zipped = zipfile.is_zipfile(path)  # files of torch before 1.6 are not, and can't be mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except unreadable as error:
        raise ValueError(f"{path.name} can't be read: {fault_of(error)}") from None
    return dict(state_dict_in(state, path.name))


def state_dict_in(saved: Any, name: str) -> Mapping[str, Tensor]:
    """State dict that was saved, or the one in what was saved, as in {"model": ..., "optimizer": ..., "epoch": 3}.
    ValueError without one, and where there are several."""
    saved = saved.get("state_dict", saved) if isinstance(saved, Mapping) else saved
    if _names_tensors(saved):
        return cast(Mapping[str, Tensor], saved)
    members = saved.items() if isinstance(saved, Mapping) else ()
    inner = [key for key, value in members if value and _names_tensors(value)]
    if len(inner) > 1:
        raise ValueError(f"{name} holds several state dicts, {', '.join(map(str, inner))}: save one of them by itself")
    if not inner:
        keys = f", but {', '.join(map(str, list(saved)[:5]))}" if isinstance(saved, Mapping) else ""
        raise ValueError(f"{name} holds no state dict{keys}")
    return cast(Mapping[str, Tensor], saved[inner[0]])


def _names_tensors(x: Any) -> bool:
    return isinstance(x, Mapping) and all(isinstance(value, Tensor) for value in x.values())


def write_state_dict(path: str | Path, state: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    """Writes to a temporary name, then renames. Tied names share a tensor: safetensors takes it once, with a note."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        untied = {name: tensor.contiguous() for name, tensor in state.items() if name not in ties}
        _safetensors().torch.save_file(untied, partial, metadata={"format": "pt", **ties})
    elif path.suffix in (".pt", ".pth", ".bin"):
        torch.save(dict(state), partial)
    else:
        raise ValueError(f"expected .safetensors, .pt or .bin, got {path.name!r}")
    os.replace(partial, path)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("a .safetensors file needs the package safetensors: pip install safetensors") from None
    return safetensors


def shardings() -> dict[str, tuple[Sharding, torch.dtype, bool]]:
    """Original name -> how this package holds it, and if it is a buffer; built on the meta device, without memory."""
    held: list[Tensor] = []
    for index in range(STAGES):
        meshes = MESHES or [MESH] * STAGES
        mesh = ParallelMesh(meshes[index], 0, lambda *_: None, torch.device("meta"))  # type: ignore[arg-type, return-value]
        mesh.stages = Stages(index, PART_STAGES, lambda *_: None, None, meshes) if STAGES > 1 else None
        model: nn.Module = build_model(mesh)
        held += model.state_dict(keep_vars=True).values()
    return {sharding(x).name: (sharding(x), x.dtype, not isinstance(x, nn.Parameter)) for x in held}


def to_sharded(source: str | Path, folder: str | Path) -> list[str]:
    """Writes a checkpoint that train.py resumes from, at step 0. Returns names of `source` that the model lacks.

    Replaces an older checkpoint; ValueError where the folder holds anything else.
    """
    if Path(folder).exists() and any(Path(folder).iterdir()) and not (Path(folder) / ".metadata").exists():
        raise ValueError(f"{folder} holds something other than a checkpoint: name a new folder")
    original = read_state_dict(source)
    state: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, (held, dtype, is_buffer) in shardings().items():
        key = next((n for n in (name, *held.ties) if n in original), None)
        if key is None and not (is_buffer and name in INITIAL):
            raise ValueError(f"{source} lacks {name}")
        value = INITIAL[name]() if key is None else original[key]
        if tuple(value.shape) != held.shape:
            raise ValueError(f"{name}: expected shape {held.shape}, got {tuple(value.shape)}")
        used |= {name, *held.ties}
        state[f"model.{name}"] = value.detach().to(dtype).reshape(held.split_shape)
    partial = Path(f"{folder}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    dcp.save(state, checkpoint_id=partial)
    (partial / "training.json").write_text(json.dumps({"step": 0, "groups": [{}]}, indent=1))
    put_in_place(folder)
    return sorted(set(original) - used)


def to_original(folder: str | Path, target: str | Path) -> None:
    """Writes the state dict of the original model from a checkpoint of any mesh; of a folder of --save from the last
    whole one there, which a line names."""
    folder = _checkpoint(Path(folder))
    saved = read_index(folder).state_dict_metadata
    state: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for name, (held, *_) in shardings().items():
        key = f"model.{name}"
        if key not in saved:
            raise ValueError(f"{folder} lacks {name}: not a checkpoint of this model")
        if saved[key].size.numel() != math.prod(held.shape):
            raise ValueError(f"{folder} has {name} of shape {tuple(saved[key].size)}, expected {held.shape}")
        whole = torch.empty(saved[key].size, dtype=saved[key].properties.dtype)
        load_tensors({key: whole}, folder)
        state[name] = whole.reshape(held.shape)
        ties |= dict.fromkeys(held.ties, name)
    state |= {tie: state[name] for tie, name in ties.items()}
    write_state_dict(target, state, ties)


def _checkpoint(folder: Path) -> Path:
    """Checkpoint of a folder; ValueError where there are some, and none of them is whole."""
    if (folder / ".metadata").exists() or not step_folders(folder):
        return folder
    newest = newest_whole(folder)
    if newest is None:
        raise ValueError(f"{folder} has no checkpoint that can be read")
    print(f"taken from {newest}", flush=True)
    return newest


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--to-sharded", nargs=2, metavar=("WEIGHTS", "FOLDER"), help="original weights to a checkpoint"
    )
    direction.add_argument(
        "--to-original",
        nargs=2,
        metavar=("FOLDER", "WEIGHTS"),
        help="a checkpoint, or the last of its folder, to weights",
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
    try:
        if options.to_sharded:
            ignored = to_sharded(*options.to_sharded)
            if ignored:
                print(f"ignored {len(ignored)} names that the model does not have: {', '.join(ignored[:5])}")
        else:
            folder, target = options.to_original
            to_original(folder, target)
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
