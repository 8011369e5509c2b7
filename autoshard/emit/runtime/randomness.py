"""Randomness: replicas agree, shards differ. `index` numbers a random operator; `random.step` is set by the caller."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .axis import held_indices, shard_cuts

if TYPE_CHECKING:
    from .mesh import ParallelMesh


Step = int | tuple[Any, int]  # a micro-batch but the first: (step, number)


def _constant_when_compiled(function: Callable[..., Any]) -> Any:
    """Does what `torch.compiler.assume_constant_result` does, which imports all of dynamo to set this attribute."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


class Moment(NamedTuple):
    """State of a training run that all random numbers of one micro-batch depend on."""

    seed: int
    step: Step
    key: int  # the hash of both
    on_device: Tensor  # the key again, () of int64: an input of compiled graphs, of which a number is a constant


class Random:
    """Seed and step of all dropout. With `exact`, masks depend on global positions only, not on the mesh (for checks).

    `training` False: dropout is off, for evaluation.
    """

    def __init__(self, mesh: ParallelMesh, seed: int = 0, step: Step = 0, exact: bool = False) -> None:
        self.mesh, self.exact = mesh, exact
        self.training = True
        self.set(seed, step)
        self._places: dict[tuple[object, str], int] = {}
        self._generator = torch.Generator()  # of the CPU, whose default one loaders draw from, in threads of their own

    def set(self, seed: int, step: Step) -> None:
        key = hash_of(seed, step)
        self.moment = Moment(seed, step, key, torch.full((), key, device=self.mesh.device))

    @property
    def seed(self) -> int:
        return self.moment.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self.set(seed, self.step)

    @property
    def step(self) -> Step:
        return self.moment.step

    @step.setter
    def step(self, step: Step) -> None:
        self.set(self.seed, step)

    @_constant_when_compiled
    def place(self, index: object, layout: str) -> int:
        """Hash of an operator and of its shard here, by the coordinates of the sharding axes; cached."""
        place = self._places.get((index, layout))
        if place is None:
            shards = [(axis.name, axis.index) for axis, *_ in shard_cuts(layout, self.mesh)]
            place = self._places[index, layout] = hash_of(index, shards)
        return place

    @_constant_when_compiled
    def sizes(self, shape: Sequence[int], layout: str) -> tuple[int, ...]:
        """Shape of the shard that is held here."""
        return tuple(len(held_indices(size, dim, layout, self.mesh)) for dim, size in enumerate(shape))

    def generator_seed(self, index: int, layout: str) -> int:
        place: int = self.place(index, layout)
        return place ^ self.moment.key

    def seeded(self, index: int, layout: str) -> torch.Generator:
        """This mesh's own CPU generator, seeded, for operators that take one."""
        return self._generator.manual_seed(self.generator_seed(index, layout))

    @contextlib.contextmanager
    def fork(self, index: int, layout: str, default: bool = False) -> Iterator[torch.Generator]:
        """A seeded generator. `default`: the generator that operators of this device draw from, restored afterwards.

        `torch.random.fork_rng` does the same for all devices of a kind, and takes ten times as long.
        """
        if self.mesh.device.type == "cpu" and not default:
            yield self.seeded(index, layout)
            return
        generator = default_generator(self.mesh.device)
        before = generator.get_state()
        generator.manual_seed(self.generator_seed(index, layout))
        try:
            yield generator
        finally:
            generator.set_state(before)

    def bits(self, index: object, layout: str, shape: Sequence[int]) -> Tensor:
        """53 random bits for each element of this shard's `shape`, by operators alone: compiled graphs draw these.

        A function of `moment.on_device`: a replayed graph (CUDA's) draws new bits, a recomputed one the same.
        """
        position = torch.arange(math.prod(shape), device=self.mesh.device).view(*shape)
        return _mixed(position, self.moment.on_device ^ self.place(index, layout))

    def keep(self, index: int, shape: Sequence[int], layout: str, p: float) -> Tensor:
        """Local part of the dropout mask of a global `shape`."""
        held = [held_indices(size, dim, layout, self.mesh) for dim, size in enumerate(shape)]
        return dropout_mask(self.seed, self.step, index, shape, p, held).to(self.mesh.device)


def default_generator(device: torch.device) -> torch.Generator:
    """Generator that operators on `device` draw from."""
    if device.type == "cpu":
        return torch.default_generator
    kind = torch.get_device_module(device)
    number = kind.current_device() if device.index is None else device.index
    return cast(torch.Generator, kind.default_generators[number])


def hash_of(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def dropout_mask(
    seed: int, step: Step, index: int, shape: Sequence[int], p: float, held: Sequence[Tensor] | None = None
) -> Tensor:
    """True where an element is kept; a pure function of (seed, step, index, global position)."""
    return random_bits(seed, step, index, shape, held) >= int(p * 2**53)


def random_bits(
    seed: int, step: Step, index: object, shape: Sequence[int], held: Sequence[Tensor] | None = None
) -> Tensor:
    """53 random bits per element, by its global position. `held[d]`: the global positions wanted along dim d (None:
    all)."""
    position = torch.zeros((), dtype=torch.int64)
    for dim, size in enumerate(shape):
        along = torch.arange(size) if held is None else held[dim]
        position = position.unsqueeze(-1) * size + along
    return _mixed(position, hash_of(seed, step, index))


def _mixed(position: Tensor, key: Tensor | int) -> Tensor:
    """First 53 bits of splitmix64; int64 arithmetic wraps."""
    z = (position ^ key) * -0x61C8864680B583EB  # inductor multiplies positions as indices, which must not wrap
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
    z = z ^ (z >> 31 & (1 << 33) - 1)
    return z >> 11 & (1 << 53) - 1


def random_dropout(x: Tensor, random: Random, *, p: float, index: int, shape: Sequence[int], layout: str) -> Tensor:
    """Dropout of a tensor of global `shape` and `layout`."""
    if not random.training:
        return x
    if torch.compiler.is_compiling():
        return x * (random.bits(index, layout, x.shape) >= int(p * 2**53)) / max(1 - p, 1e-30)
    if random.exact:
        return x * random.keep(index, shape, layout, p) / max(1 - p, 1e-30)
    if x.device.type == "cpu":  # as F.dropout spells it, which takes no generator
        noise = torch.empty_like(x).bernoulli_(1 - p, generator=random.seeded(index, layout))
        return x * noise.div_(max(1 - p, 1e-30))
    with random.fork(index, layout, default=True):
        return F.dropout(x, p)
