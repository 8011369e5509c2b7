"""Reason that nothing fits, in bytes and names: the time at which even the smallest choices of all alive overflow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.errors import NAMED, InfeasibleError
from autoshard.ir.problem import Floats, Problem, Value
from autoshard.units import format_bytes


@dataclass(frozen=True)
class Shortfall:
    """`bytes` at `time` are used by every plan: the sum of the smallest sizes of what is alive, largest first."""

    time: int
    bytes: float
    alive: tuple[tuple[str, float], ...]


def least(problem: Problem) -> Shortfall:
    """At the time where the sum of the smallest sizes is largest."""
    everything = list(_smallest(problem))
    change = np.zeros(problem.horizon + 1)
    for _, size, start, stop in everything:
        change[start] += size
        change[stop] -= size
    alive: Floats = np.cumsum(change)[:-1]
    time = int(np.argmax(alive)) if len(alive) else 0
    here = [(name, size) for name, size, start, stop in everything if start <= time < stop and size > 0]
    here.sort(key=lambda entry: (-entry[1], entry[0]))
    return Shortfall(time, sum(size for _, size in here), tuple(here))


def explained(problem: Problem) -> str:
    """List of what is alive at the worst time, at its smallest, as text."""
    shortfall = least(problem)
    if not shortfall.alive:
        return ""
    named = [f"{name} {format_bytes(size)}" for name, size in shortfall.alive[:NAMED]]
    others = shortfall.alive[NAMED:]
    if others:
        named.append(f"{len(others)} more with {format_bytes(sum(size for _, size in others))}")
    return f"at time {shortfall.time}, at their smallest: {', '.join(named)}"


class PricedShortfallError(InfeasibleError):
    """Proved by prices of the bytes at each (condensed) time, at which every plan pays for more than there is."""

    def __init__(self, message: str, hint: str, prices: Floats) -> None:
        super().__init__(message, hint)
        self.prices = prices


def short(problem: Problem, over: float, prices: Floats | None = None) -> InfeasibleError:
    """The error for a problem of which every plan is proven to be `over` bytes above the capacity: by `prices` of its
    times, or by the smallest sizes at one."""
    why = explained(problem)
    return PricedShortfallError(
        f"no plan fits: every plan needs at least {format_bytes(over)} more than the capacity of "
        f"{format_bytes(problem.capacity_bytes)}" + (f" ({why})" if why else ""),
        "more devices, a smaller batch, or a leaner optimizer",
        np.zeros(problem.horizon) if prices is None else prices,
    )


def none_fits(problem: Problem, proven: bool) -> InfeasibleError:
    """The error for a problem of which no plan fits: proven to have none, or none was found."""
    capacity, why = format_bytes(problem.capacity_bytes), explained(problem)
    alive = f" ({why})" if why else ""
    if proven:
        return InfeasibleError(f"no plan fits the capacity of {capacity}{alive}", "more devices, or a smaller batch")
    unsure = f"no plan found that fits the capacity of {capacity}, which is not proven{alive}"
    return InfeasibleError(unsure, "a longer --time-limit, more devices, or a smaller batch", proven=False)


def _smallest(problem: Problem) -> Iterator[tuple[str, float, int, int]]:
    """(name, bytes, start, stop) that every plan uses."""
    for node in problem.nodes:
        start, stop = node.interval
        if start < stop:
            allowed = node.bytes[np.isfinite(node.seconds)]
            yield node.name, float(allowed.min(initial=np.inf)) if len(allowed) else 0.0, start, stop
    for value in problem.values:
        yield from _window_least(value)


def _window_least(value: Value) -> Iterator[tuple[str, float, int, int]]:
    """Over each window its keepers may share one layout: the largest of their smallest sizes."""
    keepers = [
        (float(value.bytes[targets].min()), *span)
        for targets, span in zip(value.targets, value.intervals, strict=True)
        if span[0] < span[1]
    ]
    ends = sorted({end for _, start, stop in keepers for end in (start, stop)})
    for start, stop in itertools.pairwise(ends):
        size = max((size for size, low, high in keepers if low <= start and stop <= high), default=0.0)
        yield value.name, size, start, stop
