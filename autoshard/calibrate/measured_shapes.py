"""Shapes that a calibration measures: a few dozen, drawn by a fixed seed, which the device does in a short time."""

from __future__ import annotations

import itertools

import numpy as np

SHAPES = 40  # of products, and of attentions
LARGEST_SECONDS = 0.03  # of one kernel, at the rate of a first product
SMALLEST_BYTES = 1024  # of a collective, of which each has twice the bytes of the one before
MEMORY_BYTES = (2**14, 2**17, 2**20, 2**22, 2**24)


def products(flop_rate: float, largest: float, generator: np.random.Generator) -> list[dict[str, float]]:
    """m, n, k: from few rows to square, within `LARGEST_SECONDS` at `flop_rate` FLOP/s; no matrix above `largest`
    elements."""
    shapes: list[dict[str, float]] = []
    while len(shapes) < SHAPES:  # the smallest are far within both
        m = int(2 ** generator.uniform(4, 13))
        n, k = (64 * round(2 ** generator.uniform(0, 7)) for _ in range(2))
        if 2 * m * n * k <= LARGEST_SECONDS * flop_rate and max(m * n, n * k, m * k) <= largest:
            shapes.append({"m": m, "n": n, "k": k})
    return shapes


def attentions(flop_rate: float, generator: np.random.Generator) -> list[dict[str, float]]:
    """batch, length, heads, kv_heads, head_dim of causal attentions."""
    shapes: list[dict[str, float]] = []
    while len(shapes) < SHAPES:
        batch, heads = (2 ** int(generator.integers(0, 4)) for _ in range(2))
        length = 2 ** int(generator.integers(5, 13))
        if 2 * batch * heads * length**2 * 64 <= LARGEST_SECONDS * flop_rate:
            shapes.append({"batch": batch, "length": length, "heads": heads, "kv_heads": heads, "head_dim": 64})
    return shapes


def message_bytes(largest: float, every: int = 1) -> list[int]:
    """Message sizes of collectives up to `largest`, every `every`-th."""
    sizes = (SMALLEST_BYTES * 2**step for step in itertools.count(0, every))
    return list(itertools.takewhile(lambda size: size <= largest, sizes))


def group_sizes(world: int) -> list[int]:
    """Sizes of groups: 2, 4, 8, … and all."""
    powers = [2**step for step in range(1, world.bit_length()) if 2**step <= world]
    return sorted({*powers, world})
