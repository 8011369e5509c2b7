"""Error measure: max|a-b| / max(max|b|, 1e-6 of the largest of its kind), and what fails it.

The effect of rounding alone on a tensor (see `noise`) is allowed, up to 1e-7 of the largest of its kind; after the
first step, which no optimizer has amplified, up to 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.units import ROUNDING

THRESHOLD = ROUNDING
FLOOR = 1e-6  # of the largest of its kind: some gradients are exactly zero
MOST_NOISE = 1e-7  # of the largest of its kind
MOST_NOISE_LATER = 1e-5  # AdamW divides a gradient by its size: rounding in small ones becomes whole steps
OWN = "precision"  # of one step in the package's own precision: right or wrong, no error
EVALUATION = "evaluation"  # the outputs without dropout, before the first step
KINDS = ("output", EVALUATION, "gradient", "parameter", "buffer", OWN)


@dataclass(frozen=True)
class Error:
    """One compared tensor. `error` is relative; it is inf if `problem` says why the tensor could not be compared."""

    kind: str
    name: str
    rank: int
    step: int  # counted from 1
    error: float
    problem: str = ""

    @property
    def failed(self) -> bool:
        return not self.error <= THRESHOLD

    def __str__(self) -> str:
        what = self.problem or f"relative error {self.error:.2e}"
        return f"{self.kind} {self.name} on rank {self.rank} in step {self.step}: {what}"


@dataclass(frozen=True)
class Worst:
    """The largest error of one kind, and how many tensors were compared."""

    kind: str
    count: int
    worst: Error | None

    @property
    def failed(self) -> bool:
        return self.worst is not None and self.worst.failed


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest finite magnitude over all elements (0.0 without any): a mask may hold infinities."""
    magnitudes = (t.detach().double().abs() for t in tensors)
    return max((float(finite.max()) for t in magnitudes if (finite := t[t != math.inf]).numel()), default=0.0)


def allowed_noise(noise: float, scale: float, step: int) -> float:
    """Absolute difference that counts as rounding."""
    return min(noise, (MOST_NOISE if step == 1 else MOST_NOISE_LATER) * scale)


def compare(
    kind: str, name: str, rank: int, step: int, actual: Any, expected: torch.Tensor, scale: float, noise: float = 0.0
) -> Error:
    """Compare `actual` with `expected`, same local shape. `scale` is the largest magnitude of this kind, globally.

    `noise`: the absolute difference that rounding can make.
    """

    def bad(problem: str) -> Error:
        return Error(kind, name, rank, step, math.inf, problem)

    if not isinstance(actual, torch.Tensor):
        return bad("missing")
    if tuple(actual.shape) != tuple(expected.shape):
        return bad(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.is_floating_point() and actual.dtype != torch.float64:
        return bad(f"held in {str(actual.dtype).removeprefix('torch.')}, expected float64")
    if not expected.numel():
        return Error(kind, name, rank, step, 0.0)
    a, b = actual.detach().double(), expected.detach().double()
    alike = torch.isinf(a) & (a == b)  # as in a mask
    if not bool((torch.isfinite(a) & torch.isfinite(b) | alike).all()):
        return bad("NaN or inf")
    a, b = a.masked_fill(alike, 0.0), b.masked_fill(alike, 0.0)
    difference = float((a - b).abs().max())
    by_noise = allowed_noise(noise, scale, step) / THRESHOLD
    return Error(kind, name, rank, step, difference / max(float(b.abs().max()), FLOOR * scale, by_noise, 1e-300))


def first_failure(errors: Iterable[Error]) -> Error | None:
    """The largest error of the earliest step and kind that fail: later ones are its consequences."""
    failed = [error for error in errors if error.failed]
    return min(failed, key=lambda e: (e.step, KINDS.index(e.kind), -e.error if e.error == e.error else 0), default=None)


def summarise(errors: Iterable[Error]) -> tuple[Worst, ...]:
    """Per kind, the largest error with its name and rank; kinds without tensors count 0."""
    groups: dict[str, list[Error]] = {kind: [] for kind in KINDS}
    for error in errors:
        groups[error.kind].append(error)
    return tuple(
        Worst(kind, len(group), max(group, key=lambda e: (e.failed, e.error), default=None))
        for kind, group in groups.items()
    )
