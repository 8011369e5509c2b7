"""Initial values of a fresh model: they depend on the seed and a parameter's name only, not on the mesh.

A tensor is drawn in tiles, each from its own generator, so that a device draws what it holds and little more.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .autograd_leaves import local
from .parameters import Sharding, assign, sharding
from .randomness import hash_of

TILE = 2**20  # numbers
_DRAWN: dict[str, Callable[..., Any]] = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "trunc_normal": nn.init.trunc_normal_,
}


@torch.no_grad()
def init_parameter(tensor: Tensor, recipe: Sequence[str | float], seed: int = 0) -> None:
    """Initialises a tensor by e.g. ("normal", 0.0, 0.02), on the device that holds it. A name at the end is of the
    tensor whose numbers it has: the constructor copied them."""
    kind, *numbers = recipe
    name = _drawn_as(sharding(tensor).name, recipe)
    numbers = [number for number in numbers if not isinstance(number, str)]
    if kind == "constant":
        nn.init.constant_(local(tensor), float(numbers[0]))
        return
    local(tensor).copy_(_part(sharding(tensor), name, str(kind), numbers, seed, local(tensor).device))


def _drawn_as(name: str, recipe: Sequence[str | float]) -> str:
    return recipe[-1] if len(recipe) > 1 and isinstance(recipe[-1], str) else name


def _part(
    spec: Sharding, name: str, kind: str, numbers: Sequence[str | float], seed: int, device: torch.device
) -> Tensor:
    """This device's part of a random tensor, from the tiles that overlap it."""
    rows, columns, *tail = (*spec.shape, 1, 1)[: max(2, len(spec.shape))]
    held = [*spec.held, *[torch.arange(1)] * (2 - len(spec.held))]
    wide = max(1, min(columns, math.isqrt(TILE)))
    high = max(1, TILE // (wide * max(1, math.prod(tail))))
    result = torch.empty([len(index) for index in held], device=device)
    for top in _starts(held[0], high):
        for left in _starts(held[1], wide):
            tile = torch.empty((min(high, rows - top), min(wide, columns - left), *tail), device=device)
            generator = torch.Generator(device).manual_seed(hash_of(seed, name, top, left))
            _DRAWN[kind](tile, *numbers, generator=generator)
            spans = [_span(held[0], top, high), _span(held[1], left, wide)]
            for dim, index in enumerate(held):
                inside = index[spans[dim]] - (top, left)[dim] if dim < 2 else index
                tile = tile if len(inside) == tile.shape[dim] else tile.index_select(dim, inside.to(device))
            result[spans[0], spans[1]] = tile
    return result.reshape(spec.local_shape)


def _starts(held: Tensor, size: int) -> list[int]:
    """Starts of the tiles that contain some of the indices."""
    return [int(number) * size for number in torch.unique(held // size)]


def _span(held: Tensor, start: int, size: int) -> slice:
    """Positions in `held`, which is ascending, of a tile's indices."""
    first, last = torch.searchsorted(held, torch.tensor([start, start + size])).tolist()
    return slice(first, last)


def init_computed(tensor: Tensor, make: Callable[[], Tensor], seed: int = 0) -> None:
    """Initialises as the original's constructor does; random numbers there depend on the seed and the name only."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(hash_of(seed, _drawn_as(sharding(tensor).name, sharding(tensor).init)))
        assign(tensor, make())


def init_parameters(
    model: nn.Module, seed: int = 0, computed: Mapping[str, Callable[[], Tensor]] | None = None
) -> list[str]:
    """Initialises a whole model; `computed`: functions by original name, for tensors that no `init` recipe describes.

    Returns the names of those that got a guess: small numbers, or zero.
    """
    guessed = []
    for tensor in (*model.parameters(), *model.buffers()):
        spec = sharding(tensor)
        guess = ("normal", 0.0, 0.02) if len(spec.shape) > 1 else ("constant", 0.0)
        if computed and spec.name in computed:
            init_computed(tensor, computed[spec.name], seed)
            continue
        init_parameter(tensor, spec.init or guess, seed)
        guessed += [] if spec.init else [spec.name]
    return guessed


def unpacked(dtype: torch.dtype, shape: Sequence[int], text: str) -> Tensor:
    """Numbers decoded from zlib in base64, little endian."""
    raw = bytearray(zlib.decompress(base64.b64decode(text)))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(tuple(shape))
