"""Plans with their bytes over time, and the prices of bytes that follow from several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.ir.problem import Floats, Node, Problem, Value, memory, objective
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.result import TOLERANCE
from autoshard.solvers.relax.restricted_master import mixture


@dataclass(frozen=True, eq=False)
class Column:
    """A plan met on the way, with its true seconds and its bytes over time."""

    choice: Choice
    seconds: float
    bytes: Floats

    @property
    def peak(self) -> float:
        return float(self.bytes.max(initial=0.0))


def condensed(problem: Problem) -> Problem:
    """The same problem on the times where a peak can be: just before a stop that follows a start."""
    spans = [node.interval for node in problem.nodes] + [s for value in problem.values for s in value.intervals]
    starts = np.unique([start for start, stop in spans if start < stop])
    stops = np.unique([stop for start, stop in spans if start < stop])
    before = np.searchsorted(starts, stops)  # starts before each stop
    times = stops[np.diff(before, prepend=0) > 0] - 1

    every = np.array(spans, np.int64).reshape(-1, 2)
    moved = np.where(every[:, :1] < every[:, 1:], np.searchsorted(times, every), 0).tolist()
    following = map(tuple, moved)
    nodes = tuple(Node(node.name, node.seconds, node.bytes, next(following)) for node in problem.nodes)
    values = tuple(
        Value(
            v.name, v.producer, v.consumers, v.source, v.targets, v.seconds, v.bytes,
            tuple(next(following) for _ in v.intervals),
        )
        for v in problem.values
    )  # fmt: skip
    return replace(problem, nodes=nodes, values=values, horizon=max(1, len(times)))


def master_prices(
    columns: Sequence[Column], times: list[int], weight: float, capacity: float, unit: float, penalty: float
) -> tuple[Floats, float]:
    """Multipliers of `times` and the master's value; adds to `times` every one where the mixture overflows."""
    costs = np.array([weight * column.seconds if weight else 0.0 for column in columns])
    alive = np.stack([column.bytes for column in columns], axis=1) / unit
    while True:
        limits = np.full(len(times), capacity / unit)
        prices, weights, value = mixture(costs, alive[times], limits, penalty)
        mixed = alive @ weights
        worst = int(np.argmax(mixed))
        if worst in times or mixed[worst] <= max(mixed[times].max(), capacity / unit) + TOLERANCE:
            return prices, value
        times.append(worst)


def column_of(problem: Problem, choice: Choice) -> Column:
    return Column(choice, objective(problem, choice), memory(problem, choice))
