"""The problem as a plain sum: `scale` x seconds + sum over times of multipliers[time] x bytes alive at that time.

With scale 1 and no multipliers it is the objective; with scale 0 it is weighted memory alone; in between it is the
Lagrangian of the memory limit. An infinite entry stays infinite under every scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autoshard.ir.problem import Floats, Problem, Value


@dataclass(frozen=True, eq=False)
class Additive:
    """`cumulative[t]`: sum of the multipliers before time t, shape (horizon + 1,), per byte."""

    problem: Problem
    scale: float
    cumulative: Floats


def additive(problem: Problem, multipliers: Floats | None = None, scale: float = 1.0) -> Additive:
    """Additive problem. Asserts what solvers rely on: no cost of a value is negative, no entry a NaN. Each array is
    read once; `validate.py` says what else a problem must be."""
    for value in {(id(value.seconds), id(value.bytes)): value for value in problem.values}.values():
        assert (value.seconds >= 0).all() and (value.bytes >= 0).all(), f"{value.name}: negative or NaN entries"
    for node in {(id(node.seconds), id(node.bytes)): node for node in problem.nodes}.values():
        assert not np.isnan(node.seconds).any() and not np.isnan(node.bytes).any(), f"{node.name}: NaN entries"
    cumulative = np.zeros(problem.horizon + 1)
    if multipliers is not None:
        cumulative[1:] = np.cumsum(multipliers)
    return Additive(problem, scale, cumulative)


def charge(sum_: Additive, interval: tuple[int, int]) -> float:
    """Price of one byte that is alive over `interval`."""
    start, stop = interval
    return float(sum_.cumulative[stop] - sum_.cumulative[start]) if start < stop else 0.0


def unary(sum_: Additive, node: int) -> Floats:
    """Cost of each strategy of a node by itself."""
    here = sum_.problem.nodes[node]
    per_byte = charge(sum_, here.interval)
    seconds = scaled(sum_, here.seconds)
    return seconds + per_byte * here.bytes if per_byte else seconds


def scaled(sum_: Additive, seconds: Floats) -> Floats:
    """scale x seconds, where a forbidden entry stays forbidden."""
    if sum_.scale == 1.0:
        return seconds
    return np.where(np.isinf(seconds), np.inf, sum_.scale * np.where(np.isinf(seconds), 0.0, seconds))


def hull(value: Value) -> tuple[int, int]:
    """The span from the earliest start to the latest stop over all consumers that keep the value."""
    return span_of(value.intervals)


def span_of(intervals: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The smallest interval around those that are not empty; (0, 0) where all are."""
    spans = [(start, stop) for start, stop in intervals if start < stop]
    return (min(start for start, _ in spans), max(stop for _, stop in spans)) if spans else (0, 0)
