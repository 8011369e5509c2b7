"""Parameters: DTensors with plain shards, so that ordinary optimizers and checkpoints work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .autograd_leaves import grow_leaf, local
from .axis import held_indices, shard_cuts
from .full_tensors import full_value
from .host_rows import HOST
from .mesh import ParallelMesh


class Saved(Protocol):
    """A whole tensor that can be read in parts, see `weight_files`."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, part: tuple[slice, ...], /) -> Tensor: ...


Whole: TypeAlias = Tensor | Saved


@dataclass(frozen=True)
class Sharding:
    """Layout of a parameter. `split_shape` is `shape` with some dims unflattened: (3 * 4 * 8, 9) as (3, 4, 8, 9)."""

    name: str
    shape: tuple[int, ...]
    split_shape: tuple[int, ...]
    layout: str
    mesh: ParallelMesh
    ties: tuple[str, ...] = ()
    init: tuple[str | float, ...] = ()

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this device's part, in dims of `split_shape`."""
        return tuple(len(index) for index in self._split_held)

    @cached_property
    def held(self) -> list[Tensor]:
        """Indices that this device holds along each dim of `shape`, ascending."""
        if 0 in self.shape:  # its length does not tell one dim from another
            return self._split_held if self.split_shape == self.shape else [torch.arange(size) for size in self.shape]
        held, split = [], list(zip(self.split_shape, self._split_held, strict=True))
        for size in self.shape:
            index, length = torch.arange(1), 1
            while length < size:
                part, inner = split.pop(0)
                index, length = (index[:, None] * part + inner).flatten(), length * part
            held.append(index)
        return held

    @cached_property
    def _split_held(self) -> list[Tensor]:
        return [held_indices(size, dim, self.layout, self.mesh) for dim, size in enumerate(self.split_shape)]

    @cached_property
    def uneven(self) -> bool:
        """Is it in parts of given lengths, which DTensor does not support?"""
        return any(isinstance(unit, tuple) for *_, unit in shard_cuts(self.layout, self.mesh))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard it."""
        return tuple(axis.name for axis, *_ in shard_cuts(self.layout, self.mesh))

    def part(self, full: Whole) -> Tensor:
        """This device's part of the whole tensor, of which no more is read than necessary."""
        if not isinstance(full, Tensor):
            held = self.held
            spans = [(int(index[0]), int(index[-1]) + 1) if len(index) else (0, 0) for index in held]
            near = full[tuple(slice(*span) for span in spans)]
            for dim, (index, (first, _)) in enumerate(zip(held, spans, strict=True)):
                near = near if len(index) == near.shape[dim] else near.index_select(dim, index - first)
            return near.reshape(self.local_shape)
        part = full.reshape(self.split_shape)
        for dim in sorted({dim for _, dim, *_ in shard_cuts(self.layout, self.mesh)}):
            indices = held_indices(self.split_shape[dim], dim, self.layout, self.mesh)
            part = part.index_select(dim, indices.to(part.device))
        return part


def shard_buffer(
    name: str, shape: Sequence[int], layout: str, mesh: ParallelMesh, *,
    split_shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32, ties: Sequence[str] = (),
    init: Sequence[str | float] = (), host: bool = False, uneven: bool = False,
) -> Tensor:  # fmt: skip
    """An uninitialised tensor with layout `layout` on `split_shape` (default: `shape`).

    `init`: the recipe that `init_parameters` applies to it. `host`: in the memory of the device's host. `uneven`: in
    parts of given lengths.
    """
    if mesh.reused is not None:
        return mesh.reused[name]
    split = torch.Size(shape if split_shape is None else split_shape)
    lengths = [len(held_indices(size, dim, layout, mesh)) for dim, size in enumerate(split)]
    device_mesh = mesh.host_mesh if host and mesh.device != HOST else mesh.device_mesh
    if host and device_mesh is None and mesh.device_mesh is not None:
        raise RuntimeError(f"{name} lies in host memory\n  try: ParallelMesh.from_environment(..., host=True)")
    result = torch.empty(lengths, dtype=dtype, device=HOST if host and mesh.device.type != "meta" else mesh.device)
    if device_mesh is not None:
        dims = {axis.name: dim for axis, dim, *_ in shard_cuts(layout, mesh)}
        placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis in mesh.axes]
        stride = torch.empty(split, device="meta").stride()
        result = DTensor.from_local(result, device_mesh, placements, run_check=False, shape=split, stride=stride)
    cast(Any, result).sharding = Sharding(name, tuple(shape), tuple(split), layout, mesh, tuple(ties), tuple(init))
    grow_leaf(result)
    if uneven:
        _correct(result)
    return result


def shard_parameter(
    name: str, shape: Sequence[int], layout: str, mesh: ParallelMesh, *, split_shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32, ties: Sequence[str] = (), init: Sequence[str | float] = (),
    trainable: bool = True, host: bool = False, uneven: bool = False,
) -> nn.Parameter:  # fmt: skip
    """`shard_buffer` as a parameter. `name` and `ties` are its names in the original state dict."""
    held = shard_buffer(
        name, shape, layout, mesh, split_shape=split_shape, dtype=dtype, ties=ties, init=init, host=host, uneven=uneven
    )
    if mesh.reused is not None:
        return cast(nn.Parameter, held)
    parameter = nn.Parameter(held, requires_grad=trainable)
    cast(Any, parameter).sharding = sharding(held)
    grow_leaf(parameter)
    if uneven:
        _correct(parameter)
    return parameter


def _correct(tensor: Tensor) -> None:
    """Replaces DTensor's gather, which assumes shards of torch.chunk's sizes and is wrong for unequal parts."""
    if not isinstance(tensor, DTensor):
        return

    def refuse(*_: Any, **__: Any) -> DTensor:
        raise NotImplementedError(f"{sharding(tensor).name} is in unequal parts: its full_tensor() can be taken apart")

    corrected = cast(Any, tensor)
    corrected.full_tensor, corrected.redistribute = lambda **_: full_tensor(tensor), refuse


def sharding(tensor: Tensor) -> Sharding:
    return cast(Sharding, cast(Any, tensor).sharding)


@torch.no_grad()
def assign(tensor: Tensor, full: Whole) -> None:
    """Copies this device's part of `full` (original shape) into a sharded parameter or buffer."""
    local(tensor).copy_(sharding(tensor).part(full))


def whole_tensors(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole parameters and buffers of these original names; every rank must ask for the same."""
    stored, wanted = [*model.parameters(), *model.buffers()], {*names}
    return {sharding(tensor).name: full_tensor(tensor) for tensor in stored if sharding(tensor).name in wanted}


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Whole parameter or buffer in its original shape; every rank must call it."""
    spec = sharding(tensor)
    return full_value(local(tensor), spec.split_shape, spec.layout, spec.mesh).reshape(spec.shape)
