"""Shortest ways over the steps of a space, from several states at once.

    d(v) = min over steps (u, v) of d(u) + w(u, v),    w > 0

A round does this for all states; few are needed, for ways have few steps. Where that is more work than a heap, scipy's
Dijkstra does it, which is imported then: with all that it brings along it takes as long as planning a small model.
Both end with the same sums of floats; of equal ways the one whose last state is nearest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.redistribute.space import Integers

_MOST = 200_000  # starts times steps: more, and a heap is less work

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StepGraph:
    """Steps between `states` states, sorted by `stop`: those into `ends[i]` begin at `firsts[i]`."""

    states: int
    start: Integers
    stop: Integers
    seconds: Floats
    ends: Integers
    firsts: Integers


def step_graph(states: int, start: Integers, stop: Integers, seconds: Floats) -> StepGraph:
    order = np.argsort(stop, kind="stable")
    ends, firsts = np.unique(stop[order], return_index=True)
    return StepGraph(states, start[order], stop[order], seconds[order], ends, firsts)


def shortest(steps: StepGraph, starts: Integers) -> tuple[Floats, Integers]:
    """Seconds and previous states, each (starts, states): seconds of the shortest way, infinite if there is none; the
    state before each on it, negative at its start and if there is none."""
    if len(starts) * len(steps.start) > _MOST:
        return _by_heap(steps, starts)
    seconds = np.full((len(starts), steps.states), np.inf)
    seconds[np.arange(len(starts)), starts] = 0.0
    previous = np.full(seconds.shape, -1, np.int64)
    if not len(steps.start):
        return seconds, previous
    while True:
        through = seconds[:, steps.start] + steps.seconds
        before = seconds[:, steps.ends]
        after = np.minimum(before, np.minimum.reduceat(through, steps.firsts, axis=1))
        if np.array_equal(before, after):
            break
        seconds[:, steps.ends] = after
    ending = np.repeat(np.arange(len(steps.ends)), np.diff(np.append(steps.firsts, len(steps.start))))
    shortest_ = (through == after[:, ending]) & np.isfinite(through)
    nearness = np.where(shortest_, seconds[:, steps.start], np.inf)
    nearest = np.minimum.reduceat(nearness, steps.firsts, axis=1)
    last = np.where(shortest_ & (nearness == nearest[:, ending]), steps.start, -1)
    previous[:, steps.ends] = np.maximum.reduceat(last, steps.firsts, axis=1)
    previous[np.arange(len(starts)), starts] = -1
    return seconds, previous


def _by_heap(steps: StepGraph, starts: Integers) -> tuple[Floats, Integers]:
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import dijkstra

    order = np.argsort(steps.start, kind="stable")
    bounds = np.searchsorted(steps.start[order], np.arange(steps.states + 1))
    rows = steps.seconds[order], steps.stop[order].astype(np.int32), bounds.astype(np.int32)
    seconds, previous = dijkstra(
        csr_matrix(rows, (steps.states, steps.states)), indices=starts, return_predecessors=True
    )
    return seconds, previous
