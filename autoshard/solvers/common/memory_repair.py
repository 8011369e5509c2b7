"""Memory overflow mended by single moves: what is alive at the worst time moves where a byte saved costs the least.

Work is in proportion to what is alive at the peak, not to nodes times horizon, so that it serves large graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.ir.problem import Floats, Problem, Value, memory, target_spans
from autoshard.solvers.common import clock
from autoshard.solvers.common.local_search import Choice, Links, links, options

_Span = tuple[int, int]


def repaired(problem: Problem, choice: Sequence[int]) -> Choice | None:
    """A choice that fits the capacity, reached by moves that each lower the peak of their time; None where they end."""
    current = [int(s) for s in choice]
    linked = links(problem)
    alive = memory(problem, current)
    for _ in range(sum(len(node.seconds) for node in problem.nodes)):  # as many peaks as there are choices
        time = int(np.argmax(alive)) if len(alive) else 0
        over = float(alive[time]) - problem.capacity_bytes if len(alive) else 0.0
        if over <= 0:
            return tuple(current)
        clock.check()
        if not _relieve(problem, linked, current, alive, time, over):
            return None
    return None


def _relieve(problem: Problem, linked: Links, current: list[int], alive: Floats, time: int, over: float) -> bool:
    """Moves nodes until `over` bytes are saved at `time`, the cheapest byte first; True if anything moved.

    `current` and `alive` are changed.
    """
    moves = sorted(
        (ratio, n, s)
        for n in range(len(current))
        if len(problem.nodes[n].seconds) > 1
        for ratio, s in _moves(problem, linked, current, n, time)
    )
    moved, touched = False, set[int]()
    for _, n, s in moves:
        if n in touched:
            continue
        saved = _sizes(problem, linked, current, n, time)
        gain = float(saved[current[n]] - saved[s])
        if gain <= 0 or math.isinf(options(problem, linked, current, n)[s]):
            continue
        before = list(_spans(problem, linked, current, n))
        old, current[n] = current[n], s
        after = list(_spans(problem, linked, current, n))
        change = _profile(problem.horizon, before, after)
        worst = float((alive + change).max())
        if worst > max(float(alive.max()), problem.capacity_bytes):
            current[n] = old
            continue
        alive += change
        touched.add(n)
        moved = True
        over -= gain
        if over <= 0:
            break
    return moved


def _moves(problem: Problem, linked: Links, current: Sequence[int], n: int, time: int) -> Iterator[tuple[float, int]]:
    """(seconds a byte, choice) of every move of node n that saves bytes at `time`."""
    sizes = _sizes(problem, linked, current, n, time)
    saved = sizes[current[n]] - sizes
    if not (saved > 0).any():
        return
    seconds = options(problem, linked, current, n)
    here = float(seconds[current[n]])
    for s in np.flatnonzero((saved > 0) & np.isfinite(seconds)):
        yield ((float(seconds[s]) - here) / float(saved[s]) if math.isfinite(here) else -math.inf), int(s)


def _sizes(problem: Problem, linked: Links, current: Sequence[int], n: int, time: int) -> Floats:
    """Bytes alive at `time` that depend on node n, of each of its choices, shape (choices,)."""
    node = problem.nodes[n]
    start, stop = node.interval
    total = node.bytes.copy() if start <= time < stop else np.zeros(len(node.bytes))
    for value, position in linked.consumed[n]:
        start, stop = value.intervals[position]
        if start >= stop:
            continue
        others: dict[int, _Span] = {}
        for i, (c, targets) in enumerate(zip(value.consumers, value.targets, strict=True)):
            low, high = value.intervals[i]
            if i != position and low < high:
                a, b = others.get(int(targets[current[c]]), (low, high))
                others[int(targets[current[c]])] = (min(a, low), max(b, high))
        added = value.bytes.copy() if start <= time < stop else np.zeros(len(value.bytes))
        for target, (low, high) in others.items():
            with_it = min(start, low) <= time < max(stop, high)
            added[target] = value.bytes[target] * (with_it - (low <= time < high))
        total += added[value.targets[position]]
    return total


def _spans(problem: Problem, linked: Links, current: Sequence[int], n: int) -> Iterator[tuple[_Span, float]]:
    """Spans and bytes of all that is alive and depends on node n."""
    node = problem.nodes[n]
    yield node.interval, float(node.bytes[current[n]])
    values: list[Value] = [value for value, _ in linked.consumed[n]]
    for value in values:
        for target, span in target_spans(value, current).items():
            yield span, float(value.bytes[target])


def _profile(horizon: int, before: Sequence[tuple[_Span, float]], after: Sequence[tuple[_Span, float]]) -> Floats:
    delta = np.zeros(horizon + 1)
    for sign, spans in ((-1.0, before), (1.0, after)):
        for (start, stop), size in spans:
            if start < stop:
                delta[start] += sign * size
                delta[stop] -= sign * size
    result: Floats = np.cumsum(delta)[:-1]
    return result
