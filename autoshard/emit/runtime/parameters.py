"""Parameters: DTensors with plain shards, so that optimizers and checkpoints are the ordinary ones."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .axis import held_indices, shard_cuts, shard_size
from .leaves import grow_leaf, local
from .mesh import ParallelMesh
from .randomness import hash_of
from .redistribution import all_gather


@dataclass(frozen=True)
class Sharding:
    """How a parameter is held. `split_shape` is `shape` with some dims unflattened: (3 * 4 * 8, 9) as (3, 4, 8, 9)."""

    name: str
    shape: tuple[int, ...]
    split_shape: tuple[int, ...]
    layout: str
    mesh: ParallelMesh
    ties: tuple[str, ...] = ()
    init: tuple[str | float, ...] = ()

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard it."""
        return tuple(axis.name for axis, *_ in shard_cuts(self.layout, self.mesh))

    def part(self, full: Tensor) -> Tensor:
        """What this device holds of the whole tensor."""
        part = full.reshape(self.split_shape)
        for dim in sorted({dim for _, dim, *_ in shard_cuts(self.layout, self.mesh)}):
            indices = held_indices(self.split_shape[dim], dim, self.layout, self.mesh)
            part = part.index_select(dim, indices.to(part.device))
        return part


def shard_buffer(
    name: str, shape: Sequence[int], layout: str, mesh: ParallelMesh, *,
    split_shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32, ties: Sequence[str] = (),
    init: Sequence[str | float] = (),
) -> Tensor:  # fmt: skip
    """An uninitialised tensor that has layout `layout` says on `split_shape` (default: `shape`).

    `init` is what `init_parameters` will do to it.
    """
    split = torch.Size(shape if split_shape is None else split_shape)
    lengths = [len(held_indices(size, dim, layout, mesh)) for dim, size in enumerate(split)]
    result = torch.empty(lengths, dtype=dtype, device=mesh.device)
    if mesh.device_mesh is not None:
        dims = {axis.name: dim for axis, dim, *_ in shard_cuts(layout, mesh)}
        placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis in mesh.axes]
        stride = torch.empty(split, device="meta").stride()
        result = DTensor.from_local(result, mesh.device_mesh, placements, run_check=False, shape=split, stride=stride)
    cast(Any, result).sharding = Sharding(name, tuple(shape), tuple(split), layout, mesh, tuple(ties), tuple(init))
    grow_leaf(result)
    return result


def shard_parameter(
    name: str, shape: Sequence[int], layout: str, mesh: ParallelMesh, *, split_shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32, ties: Sequence[str] = (), init: Sequence[str | float] = (),
    trainable: bool = True,
) -> nn.Parameter:  # fmt: skip
    """The same as a parameter. `name` and `ties` are its names in the original state dict."""
    held = shard_buffer(name, shape, layout, mesh, split_shape=split_shape, dtype=dtype, ties=ties, init=init)
    parameter = nn.Parameter(held, requires_grad=trainable)
    cast(Any, parameter).sharding = sharding(held)
    grow_leaf(parameter)
    return parameter


def sharding(tensor: Tensor) -> Sharding:
    return cast(Sharding, cast(Any, tensor).sharding)


@torch.no_grad()
def assign(tensor: Tensor, full: Tensor) -> None:
    """Copies this device's part of `full` (original shape) into a sharded parameter or buffer."""
    local(tensor).copy_(sharding(tensor).part(full))


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded parameter or buffer in its original shape; every rank must call it."""
    own, x = sharding(tensor), local(tensor)
    cuts = shard_cuts(own.layout, own.mesh)
    for i, (axis, dim, *_) in reversed(list(enumerate(cuts))):  # inner axes first
        size = own.split_shape[dim]
        for outer in (cut[0] for cut in cuts[:i] if cut[1] == dim):
            size = shard_size(size, outer)
        x = all_gather(x, axis, dim, size=size)
    return x.reshape(own.shape)


_INITIALISERS: dict[str, Callable[..., Any]] = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "constant": nn.init.constant_,
    "trunc_normal": nn.init.trunc_normal_,
}


def init_parameter(tensor: Tensor, recipe: Sequence[str | float], seed: int = 0) -> None:
    """Initialises by e.g. ("normal", 0.0, 0.02); the numbers depend on the seed and the name only, not on the mesh."""
    own = sharding(tensor)
    full = torch.empty(own.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
    generator = torch.Generator().manual_seed(hash_of(seed, own.name))
    options = {} if recipe[0] == "constant" else {"generator": generator}
    _INITIALISERS[str(recipe[0])](full, *recipe[1:], **options)
    assign(tensor, full)


def init_computed(tensor: Tensor, make: Callable[[], Tensor], seed: int = 0) -> None:
    """As the original's constructor makes it; where that draws numbers, they depend on the seed and the name only."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(hash_of(seed, sharding(tensor).name))
        assign(tensor, make())


def init_parameters(
    model: nn.Module, seed: int = 0, computed: Mapping[str, Callable[[], Tensor]] | None = None
) -> list[str]:
    """Initialises a whole model; `computed` are functions by original name, for what no recipe of `init` says.

    Returns the names of those that got a guess: small numbers, or zero.
    """
    guessed = []
    for tensor in (*model.parameters(), *model.buffers()):
        own = sharding(tensor)
        guess = ("normal", 0.0, 0.02) if len(own.shape) > 1 else ("constant", 0.0)
        if computed and own.name in computed:
            init_computed(tensor, computed[own.name], seed)
            continue
        init_parameter(tensor, own.init or guess, seed)
        guessed += [] if own.init else [own.name]
    return guessed


def unpacked(dtype: torch.dtype, shape: Sequence[int], text: str) -> Tensor:
    """Numbers as zlib in base64, little endian."""
    raw = bytearray(zlib.decompress(base64.b64decode(text)))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(tuple(shape))
