"""State dicts with the original names and shapes, and checkpoints that load on another number of devices."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .autograd_leaves import local
from .checkpoint_index import fault_of, load_tensors, read_index
from .loss_scaling import LossScaler
from .parameters import Sharding, assign, full_tensor, sharding


def _named(model: nn.Module) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """(original names, parameter or buffer) of all that a state dict holds; a tied tensor once."""
    seen: set[int] = set()
    for path, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            held: Sharding | None = getattr(tensor, "sharding", None)
            if held is None:
                raise TypeError(f"{path} is not sharded: build the model in its dtype and device instead of casting it")
            yield (held.name, *held.ties), tensor


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the original model, on the CPU of rank 0, empty on the others; every rank must call it."""
    result: dict[str, Tensor] = {}
    for names, tensor in _named(model):
        full = full_tensor(tensor)
        if sharding(tensor).mesh.rank == 0:
            result.update(dict.fromkeys(names, full.detach().cpu().clone()))
    return result


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], computed: Collection[str] = ()) -> None:
    """Loads this device's part of the original model's state dict. Raises KeyError that lists missing names.

    Buffers named in `computed` may be missing: they keep their values.
    """
    keys = {names: next((name for name in names if name in state), None) for names, _ in _named(model)}
    optional = {names for names, x in _named(model) if names[0] in computed and not isinstance(x, nn.Parameter)}
    missing = [names[0] for names, name in keys.items() if name is None and names not in optional]
    if missing:
        raise KeyError(f"the state dict lacks {_few(missing)}{_prefixed(missing, state)}")
    for names, tensor in _named(model):
        if keys[names] is None:
            continue
        full = state[str(keys[names])]
        if tuple(full.shape) != sharding(tensor).shape:
            raise ValueError(f"{names[0]}: expected shape {sharding(tensor).shape}, got {tuple(full.shape)}")
        assign(tensor, full)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _prefixed(missing: Sequence[str], state: Mapping[str, Any]) -> str:
    """Advice if all missing tensors exist under longer names, as wrappers save them (DDP: module.)."""
    prefixes = [key.removesuffix(missing[0]) for key in state if key.endswith(f".{missing[0]}")]
    matching = [prefix for prefix in prefixes if all(prefix + name in state for name in missing)]
    if not matching:
        return ""
    stripped = f"{{name.removeprefix({matching[0]!r}): x for name, x in state.items()}}"
    return f"; it has them with {matching[0]!r} before their names\n  try: save {stripped}"


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    loader: Any = None,
    background: bool = False,
    scaler: LossScaler | None = None,
    run: str = "",
    seed: int | None = None,
    staged: bool = True,
    uneven: bool = True,
) -> None:
    """Writes model, optimizer, step, dropout's seed and the loss scale; the folder appears only when it is complete.
    Raises SaveError on all ranks if it can't be written; an incomplete folder is removed.

    `loader`: its state on this rank is saved. `run`: the run's identity. `seed`: by default that of the model's
    weights. In the `background`, state is copied to the host and written while training goes on; `finish_saving` waits
    for it, and so does the next save. `staged`: there may be stages. `uneven`: a table may be in unequal parts.
    """
    finish_saving()
    named = {names[0]: tensor for names, tensor in _named(model)}
    if staged:
        earlier = _held_earlier(named)
        named = {name: tensor for name, tensor in named.items() if name not in earlier}
    state: dict[str, Any] = {}
    for name, tensor in named.items():
        held = {f"model.{name}": tensor.detach()}
        held |= {f"optimizer.{name}.{slot}": value for slot, value in optimizer.state.get(tensor, {}).items()}
        state |= {key: _as_held(x, sharding(tensor)) for key, x in held.items()} if uneven else held
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if seed is None:
        seed = next((sharding(tensor).mesh.random.seed for tensor in named.values()), 0)
    partial = Path(f"{folder}.partial")
    training: dict[str, Any] = {"step": step, "seed": seed, "groups": groups} | ({"run": run} if run else {})
    if scaler is not None:
        training["scaler"] = scaler.state_dict()
    _together(partial, _fault(lambda: _begin(partial, training)) if dist.get_rank() == 0 else "")
    record = {"ranks": dist.get_world_size(), "state": loader}
    fault = _fault(lambda: torch.save(record, partial / f"loader-{dist.get_rank()}.pt")) if loader is not None else ""
    if uneven and background and _anywhere(any(sharding(tensor).uneven for tensor in named.values())):
        background = False  # a copy of a table in unequal parts would not know where its rows are
        if dist.get_rank() == 0:
            print(f"{folder} is written at once, not in the background: a table is in unequal parts", flush=True)
    if background:
        copied = {key: value.clone() if value.device.type == "cpu" else value for key, value in state.items()}
        saving = dcp.async_save(copied, checkpoint_id=partial, process_group=_host_group())
        _SAVING.append((saving, Path(folder), fault))
        return
    _appear(Path(folder), _fault(lambda: dcp.save(state, checkpoint_id=partial)) or fault)


class SaveError(Exception):
    """A checkpoint could not be written, e.g. because no space is left."""


def _begin(partial: Path, training: dict[str, Any]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "training.json").write_text(json.dumps(training, indent=1))


def _fault(write: Callable[[], object]) -> str:
    """Error message of `write`; "" if it succeeds."""
    try:
        write()
    except CheckpointException as error:  # torch gathers those of all ranks
        return fault_of(next(cause for cause, _ in error.failures.values()))
    except (OSError, RuntimeError) as error:  # torch's own writer of files knows RuntimeError only
        return fault_of(error)
    return ""


def _held_earlier(named: Mapping[str, Tensor]) -> set[str]:
    """Names that an earlier stage or place saves: on separate meshes they hold other parts of the same tensors."""
    mesh = next((sharding(tensor).mesh for tensor in named.values()), None)
    if mesh is not None and mesh.stages is None:
        return set()  # there are no stages
    place = 0 if mesh is None or mesh.stages is None else mesh.stages.index
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (place, [*named] if mesh is not None and mesh.rank == 0 else []))
    return {name for other, names in gathered if other < place for name in names}


def _anywhere(here: bool) -> bool:
    """True if `here` holds on any rank: other stages hold other tensors."""
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, here)
    return any(flags)


def _together(partial: Path, fault: str) -> None:
    """A barrier. Raises SaveError on all ranks if one of them has a fault, and removes the folder."""
    faults: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    reports = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]
    if reports:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise SaveError(f"{partial.with_suffix('')} could not be written, by {reports[0]}")


_SAVING: list[tuple[Any, Path, str]] = []  # what is written in the background: at most one
_HOST_GROUPS: list[Any] = []


def finish_saving(last: bool = False) -> None:
    """Waits for the save in the background. All ranks must call it. `last`: no save will follow."""
    while _SAVING:
        saving, folder, fault = _SAVING.pop()
        wait = getattr(saving, "upload_completion", saving).result
        _appear(folder, _fault(wait) or fault)
    if last:
        _HOST_GROUPS.clear()


def _appear(folder: Path, fault: str) -> None:
    _together(Path(f"{folder}.partial"), fault)
    _together(Path(f"{folder}.partial"), _fault(lambda: put_in_place(folder)) if dist.get_rank() == 0 else "")


def put_in_place(folder: str | Path) -> None:
    """Renames `folder.partial` to `folder`. An older one is moved aside first and removed last: an interruption in
    between leaves both whole."""
    older = Path(f"{folder}.older")
    shutil.rmtree(older, ignore_errors=True)
    if Path(folder).exists():
        os.replace(folder, older)
    os.replace(f"{folder}.partial", folder)
    shutil.rmtree(older, ignore_errors=True)


def _host_group() -> Any:
    """A group for collectives of the host, which run in parallel to those of training."""
    if not _HOST_GROUPS:
        _HOST_GROUPS.append(dist.new_group(backend="gloo"))
    return _HOST_GROUPS[0]


def loader_state(folder: str | Path) -> Any:
    """Saved state of this rank's loader; None if there is none, or if it is of another number of ranks.

    Raises ValueError if the file is damaged, or would run code."""
    file = Path(folder) / f"loader-{dist.get_rank()}.pt"
    if not file.exists():
        return None
    try:
        saved: Any = torch.load(file, weights_only=True) if file.is_file() else None
        return saved["state"] if saved["ranks"] == dist.get_world_size() else None
    except (RuntimeError, EOFError, pickle.UnpicklingError, TypeError, KeyError) as error:
        raise ValueError(f"{file} can't be read: {fault_of(error)}") from None


def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler | None = None,
    *, staged: bool = True, uneven: bool = True,
) -> int:  # fmt: skip
    """Loads what save_checkpoint wrote, on any mesh, and sets the seed of dropout; returns the step.

    KeyError names what the checkpoint lacks, ValueError what has another size there. `staged`, `uneven`: see
    `save_checkpoint`.
    """
    saved, training = read_index(folder).state_dict_metadata, _training(Path(folder))
    wanted: dict[str, tuple[Any, Sharding]] = {}
    for names, tensor in _named(model):
        held = {f"model.{names[0]}": tensor.detach()}
        if staged and held.keys() <= wanted.keys():
            continue
        prefix = f"optimizer.{names[0]}."
        for key in sorted(key for key in saved if key.startswith(prefix)):
            held[key] = optimizer.state[tensor][key.removeprefix(prefix)] = _slot(tensor, saved[key], optimizer)
        wanted |= {key: (_as_held(x, sharding(tensor)) if uneven else x, sharding(tensor)) for key, x in held.items()}
    missing = [key for key in wanted if key not in saved]
    if missing:
        raise KeyError(f"the checkpoint {folder} lacks {_few(missing)}")
    shapes = {key: tuple(cast(TensorStorageMetadata, saved[key]).size) for key in wanted}
    for key, (x, spec) in wanted.items():
        if tuple(x.shape) != shapes[key] and math.prod(spec.shape) != math.prod(shapes[key]):
            raise ValueError(f"{key} has shape {shapes[key]} in the checkpoint {folder}, here {spec.shape}")
    _fill(wanted, shapes, folder, staged)
    if staged:
        for names, tensor in _named(model):  # buffers that several parts of a place hold, each its own
            key, spec = f"model.{names[0]}", sharding(tensor)
            if wanted[key][1] is not spec:
                _fill({key: (tensor.detach(), spec)}, shapes, folder, staged)
    if len(training["groups"]) not in (len(optimizer.param_groups), 1):
        decay = max(group.get("weight_decay", 0.0) for group in training["groups"])
        raise ValueError(f"it was saved with --weight-decay\n  try: --weight-decay {decay:g}, as saved")
    skipped = _KERNELS if len(training["groups"]) == len(optimizer.param_groups) else {*_KERNELS, "weight_decay"}
    saved_groups = training["groups"] * (len(optimizer.param_groups) // len(training["groups"]))
    for group, values in zip(optimizer.param_groups, saved_groups, strict=True):
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k not in skipped})
    for _, spec in wanted.values():
        spec.mesh.random.seed = training.get("seed", spec.mesh.random.seed)
    if scaler is not None and "scaler" in training:
        scaler.load_state_dict(training["scaler"])
    return int(training["step"])


def saved_seed(folder: str | Path) -> int:
    """Seed of the run that wrote the checkpoint."""
    return int(_training(Path(folder)).get("seed", 0))


def _training(folder: Path) -> dict[str, Any]:
    """Saved values other than tensors. Raises ValueError if they are damaged."""
    path = folder / "training.json"
    fields: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    groups: Any = fields.get("groups") if isinstance(fields, dict) else None
    named = isinstance(groups, list) and groups and all(isinstance(group, dict) for group in groups)
    counts = named and type(fields.get("step")) is int and fields["step"] >= 0 and type(fields.get("seed", 0)) is int
    if not counts or not all(_is_setting(*setting) for group in groups for setting in group.items()):
        raise ValueError(f"{path} is missing or damaged")
    return cast(dict[str, Any], fields)


def _is_setting(name: str, value: Any) -> bool:
    """Is this a valid optimizer setting: a number, a switch, or a list of them?"""
    values = value if isinstance(value, list) else [value]
    return name != "params" and all(item is None or isinstance(item, int | float) for item in values)


_KERNELS = {"fused", "foreach", "capturable", "differentiable"}  # how this device steps, not the one before


def _as_held(x: Any, spec: Sharding) -> Any:
    """A tensor in the form that a checkpoint takes: one in parts of given lengths lists its own rows."""
    if not spec.uneven or not isinstance(x, DTensor):
        return x
    starts = [int(held[0]) if len(held) else 0 for held in spec.held]
    here, offsets, sizes = local(x), torch.Size(starts), torch.Size(local(x).shape)
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(here), torch.Size(spec.shape))

    def items(name: str, _: Any) -> list[WriteItem]:
        return [WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)]

    held = cast(Any, x)
    held.__create_write_items__, held.__create_chunk_list__ = items, lambda: [chunk]
    held.__get_tensor_shard__ = lambda _: here
    return x


def _slot(parameter: Tensor, saved: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """An empty optimizer state: of the parameter's shape, or one small tensor (a step count)."""
    if math.prod(saved.size) == parameter.numel() and len(saved.size) > 0:
        return torch.zeros_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
    if math.prod(saved.size) > max(parameter.numel(), 1):
        raise ValueError(f"the optimizer has a state of shape {tuple(saved.size)} for {tuple(parameter.shape)}")
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.zeros(saved.size, dtype=saved.properties.dtype, device=parameter.device if on_device else "cpu")


def _fill(
    wanted: Mapping[str, tuple[Any, Sharding]], shapes: Mapping[str, tuple[int, ...]], folder: str | Path, alone: bool
) -> None:
    """Reads all of `wanted`, which have these `shapes` in the checkpoint. `alone`: see `load_tensors`."""
    same = {key: x for key, (x, _) in wanted.items() if tuple(x.shape) == shapes[key]}
    load_tensors(same, folder, alone)
    for key, (x, spec) in wanted.items():
        if tuple(x.shape) != shapes[key]:  # the other mesh held it in other blocks: by way of the whole tensor
            whole = torch.empty(shapes[key], dtype=x.dtype)
            load_tensors({key: whole}, folder, alone)
            local(x).copy_(spec.part(whole))
