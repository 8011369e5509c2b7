"""Randomness: replicas agree, shards differ. `index` numbers a random operator; `random.step` is set by the caller."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, library

from .axis import held_indices, shard_cuts

if TYPE_CHECKING:
    from .mesh import ParallelMesh


Step = int | tuple[Any, int]  # a micro-batch but the first: (step, number)


_RANDOMS: list[weakref.ref[Random]] = []  # what an operator of a compiled graph finds its seed by


class Random:
    """The seed of all dropout. With `exact`, masks depend on global positions only, not on the mesh (for checks).

    `training` False: dropout lets everything pass, for evaluation.
    """

    def __init__(self, mesh: ParallelMesh, seed: int = 0, step: Step = 0, exact: bool = False) -> None:
        self.mesh, self.seed, self.step, self.exact = mesh, seed, step, exact
        self.training = True
        self.number = len(_RANDOMS)
        _RANDOMS.append(weakref.ref(self))
        self._places: dict[tuple[int, str], int] = {}  # of an operator and a layout: the hash of its shard here
        self._time, self._hash_of_time = (seed, step), hash_of(seed, step)
        self._own = torch.Generator()  # of the CPU, whose default one loaders draw from, in threads of their own

    def generator_seed(self, index: int, layout: str) -> int:
        """A function of (seed, step, index, coordinates of the sharding axes), by hashes that are made once."""
        if self._time != (self.seed, self.step):
            self._time = self.seed, self.step
            self._hash_of_time = hash_of(*self._time)
        place = self._places.get((index, layout))
        if place is None:
            shards = [(axis.name, axis.index) for axis, *_ in shard_cuts(layout, self.mesh)]
            place = self._places[index, layout] = hash_of(index, shards)
        return place ^ self._hash_of_time

    def seeded(self, index: int, layout: str) -> torch.Generator:
        """The CPU's generator of this mesh, for operators that take one; no other draws from it."""
        return self._own.manual_seed(self.generator_seed(index, layout))

    @contextlib.contextmanager
    def fork(self, index: int, layout: str, default: bool = False) -> Iterator[torch.Generator]:
        """A seeded generator. `default`: the one that operators of this device draw from, as it was afterwards.

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

    def traced_keep(self, like: Tensor, index: int, layout: str, p: float) -> Tensor:
        """A mask of `like`'s shape, drawn as by `fork` when a compiled graph runs: the step is no constant of it."""
        keep: Tensor = _traced_keep(like.detach(), self.number, index, layout, p)
        return keep

    def keep(self, index: int, shape: Sequence[int], layout: str, p: float) -> Tensor:
        """The local part of the dropout mask of a global `shape`."""
        held = [held_indices(size, dim, layout, self.mesh) for dim, size in enumerate(shape)]
        return dropout_mask(self.seed, self.step, index, shape, p, held).to(self.mesh.device)


def _drawn_keep(like: Tensor, number: int, index: int, layout: str, p: float) -> Tensor:
    random = _RANDOMS[number]()
    assert random is not None
    with random.fork(index, layout) as generator:
        return torch.empty_like(like).bernoulli_(1 - p, generator=generator)


def _free_name() -> str:
    """Of an operator that no copy of this file has registered which the process loaded before, of another package."""
    names = map("parallel_runtime_{}".format, itertools.count())
    return "::".join((next(name for name in names if not hasattr(getattr(torch.ops, name), "keep")), "keep"))


_traced_keep = library.custom_op(_free_name(), _drawn_keep, mutates_args=())
_traced_keep.register_fake(lambda like, *_: torch.empty_like(like))


def default_generator(device: torch.device) -> torch.Generator:
    """That which operators on `device` draw from."""
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
    """53 random bits an element, by its global position. `held[d]`: the global positions along dim d that are wanted
    (None: all)."""
    position = torch.zeros((), dtype=torch.int64)
    for dim, size in enumerate(shape):
        along = torch.arange(size) if held is None else held[dim]
        position = position.unsqueeze(-1) * size + along
    z = position * -0x61C8864680B583EB + hash_of(seed, step, index)  # splitmix64; int64 arithmetic wraps
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
    z = z ^ (z >> 31 & (1 << 33) - 1)
    return z >> 11 & (1 << 53) - 1


def random_dropout(x: Tensor, random: Random, *, p: float, index: int, shape: Sequence[int], layout: str) -> Tensor:
    """Dropout of a tensor of global `shape` and `layout`."""
    if not random.training:
        return x
    if torch.compiler.is_compiling():
        return x * random.traced_keep(x, index, layout, p) / max(1 - p, 1e-30)
    if random.exact:
        return x * random.keep(index, shape, layout, p) / max(1 - p, 1e-30)
    if x.device.type == "cpu":  # as F.dropout spells it, which takes no generator
        noise = torch.empty_like(x).bernoulli_(1 - p, generator=random.seeded(index, layout))
        return x * noise.div_(max(1 - p, 1e-30))
    with random.fork(index, layout, default=True):
        return F.dropout(x, p)
