"""Random operators other than dropout and attention: replicas agree, shards differ.

`index` numbers a random operator; `shape` and `layout` are the global ones of the random tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .axis import held_indices
from .randomness import Random, Step, random_bits

_ALPHA = -float(nn.functional.selu(torch.tensor(-math.inf, dtype=torch.float64)))  # SELU's lowest value, negated


def exact_values(
    seed: int, step: Step, index: int, shape: Sequence[int], kind: str, first: float, second: float,
    held: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Numbers in float64 (or int64): a pure function of (seed, step, index, global position).

    `kind`: "uniform" in [first, second), "integers" in [first, second), "normal" with mean and deviation, "exponential"
    with rate `first`, "bernoulli" one with probability `first`.
    """
    return _values(lambda of: random_bits(seed, step, of, shape, held), index, kind, first, second, torch.float64)


def _values(
    bits: Callable[[object], Tensor], index: int, kind: str, first: float, second: float, dtype: torch.dtype
) -> Tensor:
    if kind == "bernoulli":
        return (bits(index) >= int((1 - first) * 2**53)).to(dtype)
    if kind == "integers":
        return int(first) + bits(index) % int(second - first)
    if kind == "uniform":
        return first + (second - first) * _unit(bits(index), dtype)
    if kind == "exponential":
        return -_unit(bits(index), dtype, 0.5).log() / first
    angle = 2 * math.pi * _unit(bits((index, "angle")), dtype)
    return first + second * _unit(bits(index), dtype, 0.5).log().mul(-2).sqrt() * angle.cos()


def _unit(bits: Tensor, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    """Numbers between 0 and 1 from 53 random bits, or from the 24 of them that a float32 holds."""
    mantissa = 53 if dtype == torch.float64 else 24
    return ((bits >> 53 - mantissa).to(dtype) + offset) / 2**mantissa


def _drawn(
    random: Random, index: int, shape: Sequence[int], layout: str, kind: str, first: float, second: float
) -> Tensor:
    if random.exact:
        held = [held_indices(size, dim, layout, random.mesh) for dim, size in enumerate(shape)]
        return exact_values(random.seed, random.step, index, shape, kind, first, second, held).to(random.mesh.device)
    sizes = random.sizes(tuple(shape), layout)
    if torch.compiler.is_compiling():
        return _values(lambda of: random.bits(of, layout, sizes), index, kind, first, second, torch.float32)
    tensor = torch.empty(sizes, device=random.mesh.device)
    with random.fork(index, layout) as generator:
        if kind == "integers":
            return torch.randint(int(first), int(second), tensor.shape, generator=generator, device=tensor.device)
        if kind == "normal":
            return tensor.normal_(first, second, generator=generator)
        if kind == "exponential":
            return tensor.exponential_(first, generator=generator)
        if kind == "bernoulli":
            return tensor.bernoulli_(first, generator=generator)
        return tensor.uniform_(first, second, generator=generator)


def random_tensor(
    random: Random, *, kind: str, first: float, second: float, dtype: torch.dtype, index: int, shape: Sequence[int],
    layout: str,
) -> Tensor:  # fmt: skip
    """Local part of a random tensor; see `exact_values` for its kinds."""
    return _drawn(random, index, shape, layout, kind, first, second).to(dtype)


def random_bernoulli(p: Tensor, random: Random, *, index: int, shape: Sequence[int], layout: str) -> Tensor:
    """One with the probability in `p`, else zero."""
    return (_drawn(random, index, shape, layout, "uniform", 0.0, 1.0).to(p.dtype) < p).to(p.dtype)


def random_noise(
    x: Tensor, random: Random, *, p: float, alpha: bool, index: int, shape: Sequence[int], layout: str
) -> Tensor:
    """Dropout that keeps mean and variance (`alpha`), or drops whole features: `shape` is one along their dims."""
    if not random.training:
        return x
    noise = _drawn(random, index, shape, layout, "bernoulli", 1 - p, 0.0).to(x.dtype)
    if not alpha or p == 1:
        return x * noise / max(1 - p, 1e-30)
    return x * scaled_noise(noise, p)[0] + scaled_noise(noise, p)[1]


def scaled_noise(noise: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Factor and offset of alpha dropout."""
    scale = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    return noise * scale, (noise - 1) * (_ALPHA * scale) + _ALPHA * scale * p


def random_multinomial(
    p: Tensor, random: Random, *, num_samples: int, replacement: bool = False, index: int, shape: Sequence[int],
    layout: str,
) -> Tensor:  # fmt: skip
    """Indices drawn by the weights in the last dim, which is not sharded."""
    if not random.exact and not torch.compiler.is_compiling():
        with random.fork(index, layout) as generator:
            return torch.multinomial(p, num_samples, replacement, generator=generator)
    drawn = (*shape[:-1], num_samples) if replacement else shape
    uniform = _drawn(random, index, drawn, layout, "uniform", 0.0, 1.0)
    return chosen(p.to(uniform.dtype), uniform, num_samples, replacement)


def chosen(p: Tensor, uniform: Tensor, num_samples: int, replacement: bool) -> Tensor:
    """Indices selected by these uniform numbers."""
    if replacement:
        ends = p.cumsum(-1)
        return torch.searchsorted(ends, uniform * ends[..., -1:], right=True).clamp(max=p.shape[-1] - 1)
    keys = p.log() - (-uniform.clamp(min=2.0**-53).log()).log()
    return keys.topk(num_samples).indices
