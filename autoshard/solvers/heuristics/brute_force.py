"""The oracle: every combination, evaluated with arrays. It shares no code with the other solvers."""

from __future__ import annotations

import math
import time

import numpy as np

from autoshard.errors import InfeasibleError, UsageError
from autoshard.ir.problem import SLAB, Floats, Integers, Problem, Value
from autoshard.solvers.common.effort import SMALL_ENTRIES
from autoshard.solvers.common.result import Solution, finish
from autoshard.units import EXACT, format_bytes


def solve(problem: Problem) -> Solution:
    """The best choice that fits; ties by the lowest strategies. UsageError above SMALL_ENTRIES combinations.

    Raises InfeasibleError where every combination is forbidden or too large, with the exact shortfall in bytes.
    """
    started = time.perf_counter()
    sizes = tuple(len(node.seconds) for node in problem.nodes)
    count = math.prod(sizes)
    if count > SMALL_ENTRIES:
        raise UsageError(f"exhaustive search over {count} combinations: at most {SMALL_ENTRIES}", "--solver dp")
    best, best_flat, least = math.inf, -1, math.inf
    for low in range(0, count, SLAB):
        flat = np.arange(low, min(low + SLAB, count))
        digits = [np.asarray(d) for d in np.unravel_index(flat, sizes)] if sizes else []
        seconds = _seconds(problem, digits, len(flat))
        peaks = _memory(problem, digits, len(flat)).max(axis=0, initial=0.0)
        least = min(least, float(peaks[np.isfinite(seconds)].min(initial=math.inf)))
        seconds = np.where(peaks <= problem.capacity_bytes * (1 + EXACT), seconds, np.inf)
        at = int(np.argmin(seconds))
        if seconds[at] < best:
            best, best_flat = float(seconds[at]), low + at
    if best_flat < 0:
        raise _infeasible(problem, least)
    choice = tuple(int(d) for d in np.unravel_index(best_flat, sizes)) if sizes else ()
    return finish(problem, choice, best, "exhaustive", started)


def _infeasible(problem: Problem, least: float) -> InfeasibleError:
    if math.isinf(least):
        return InfeasibleError("every combination of strategies is forbidden: no strategies of all nodes go together")
    over, capacity = format_bytes(least - problem.capacity_bytes), format_bytes(problem.capacity_bytes)
    return InfeasibleError(f"no plan fits: the smallest peak is {over} above the capacity of {capacity}")


def _seconds(problem: Problem, digits: list[Integers], count: int) -> Floats:
    total = np.zeros(count)
    for node, strategy in zip(problem.nodes, digits, strict=True):
        total += node.seconds[strategy]
    for value in problem.values:
        source = value.source[digits[value.producer]]
        needed = _targets(value, digits)
        for i, target in enumerate(needed):
            first = np.all([target != earlier for earlier in needed[:i]], axis=0) if i else np.ones(count, bool)
            total[first] += value.seconds[source[first], target[first]]
    return total


def _memory(problem: Problem, digits: list[Integers], count: int) -> Floats:
    alive = np.zeros((problem.horizon, count))
    for node, strategy in zip(problem.nodes, digits, strict=True):
        alive[node.interval[0] : max(node.interval)] += node.bytes[strategy]
    for value in problem.values:
        needed = _targets(value, digits)
        keepers = [i for i, (start, stop) in enumerate(value.intervals) if start < stop]
        for t in range(len(value.bytes)):
            starts = np.full(count, problem.horizon)
            stops = np.zeros(count, np.int64)
            for i in keepers:
                here = needed[i] == t
                starts[here] = np.minimum(starts[here], value.intervals[i][0])
                stops[here] = np.maximum(stops[here], value.intervals[i][1])
            for time_step in range(problem.horizon):
                alive[time_step] += value.bytes[t] * ((starts <= time_step) & (time_step < stops))
    return alive


def _targets(value: Value, digits: list[Integers]) -> list[Integers]:
    return [target[digits[c]] for c, target in zip(value.consumers, value.targets, strict=True)]
