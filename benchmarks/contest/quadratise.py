"""Any Problem written with pairs only: nodes with one interval each, and a cost matrix between two nodes.

A value with one consumer is a matrix. One with several consumers pays once for every distinct target that they need:
each such target becomes an extra node of two choices, made or not. The producer pays where it is made, and a consumer
that needs it forbids that it is not. Bytes that are kept over a span which depends on the choices become extra nodes,
one for each window between two ends of spans: alive there, or not. The objective and the memory of a plan are those
of the cheapest and smallest choice of the extra nodes; `extended` gives it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.ir.problem import Floats, Integers, Problem, Value
from autoshard.solvers.common import clock

_ABSENT, _PRESENT = 0, 1
_LARGE = 500  # nodes: below, elimination is tried at once


@dataclass(frozen=True, eq=False)
class Pairwise:
    """`unary[n]` and `usage[n]` (choices,); `spans` (nodes, 2): alive at start <= t < stop; `costs[e]` (choices of
    pairs[e][0], choices of pairs[e][1]), inf: forbidden. Equal matrices are mostly one object.

    The first nodes are those of the problem it was made of; `names` of all.
    """

    names: tuple[str, ...]
    unary: tuple[Floats, ...]
    usage: tuple[Floats, ...]
    spans: Integers
    pairs: tuple[tuple[int, int], ...]
    costs: tuple[Floats, ...]
    capacity: float
    horizon: int


def pairwise(problem: Problem) -> Pairwise:
    return _PairWriter(problem).written()


class _PairWriter:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.names = [node.name for node in problem.nodes]
        self.unary = [node.seconds for node in problem.nodes]
        self.usage = [node.bytes for node in problem.nodes]
        self.spans = [node.interval for node in problem.nodes]
        self.pairs: list[tuple[int, int]] = []
        self.costs: list[Floats] = []
        self.known: dict[tuple[object, ...], Floats] = {}

    def written(self) -> Pairwise:
        for value in self.problem.values:
            clock.check()
            if len(value.consumers) == 1:
                self.connect(value.producer, value.consumers[0], self.matrix(value))
            else:
                self.add_shared(value)
            self.add_kept(value)
        spans = np.array(self.spans, np.int64).reshape(-1, 2)
        return Pairwise(
            names=tuple(self.names),
            unary=tuple(self.unary),
            usage=tuple(self.usage),
            spans=np.where(spans[:, :1] < spans[:, 1:], spans, 0),
            pairs=tuple(self.pairs),
            costs=tuple(self.costs),
            capacity=self.problem.capacity_bytes,
            horizon=self.problem.horizon,
        )

    def connect(self, a: int, b: int, cost: Floats) -> None:
        self.pairs.append((a, b))
        self.costs.append(cost)

    def matrix(self, value: Value) -> Floats:
        """Seconds for every choice of the producer and of the one consumer; equal ones are one object."""
        key = (id(value.seconds), value.source.tobytes(), value.targets[0].tobytes())
        if key not in self.known:
            self.known[key] = np.ascontiguousarray(value.seconds[value.source][:, value.targets[0]])
        return self.known[key]

    def add_node(self, name: str, usage: Sequence[float], span: tuple[int, int]) -> int:
        self.names.append(name)
        self.unary.append(np.zeros(len(usage)))
        self.usage.append(np.array(usage, float))
        self.spans.append(span)
        return len(self.names) - 1

    def add_shared(self, value: Value) -> None:
        for target in np.unique(np.concatenate(value.targets)).tolist():
            made = self.add_node(f"{value.name}: layout {target} is made", [0.0, 0.0], (0, 0))
            pay = np.zeros((len(value.source), 2))
            pay[:, _PRESENT] = value.seconds[value.source, target]
            self.connect(value.producer, made, pay)
            for c, targets in zip(value.consumers, value.targets, strict=True):
                if (targets == target).any():
                    self.connect(c, made, self.needs(targets == target))

    def needs(self, needed: Integers) -> Floats:
        """Forbids that something which is needed is absent."""
        key = ("needs", needed.tobytes())
        if key not in self.known:
            cost = np.zeros((len(needed), 2))
            cost[needed.astype(bool), _ABSENT] = np.inf
            self.known[key] = cost
        return self.known[key]

    def add_kept(self, value: Value) -> None:
        """A window is alive where one keeper of the target starts before it and one (another, perhaps) stops after."""
        spans = _keepers(value)
        if len(spans) == 1:
            self.add_one_keeper(value, *spans[0])
            return
        for target in np.unique(np.concatenate(value.targets)).tolist():
            keepers = [(c, targets == target, span) for c, targets, span in spans if (targets == target).any()]
            size = float(value.bytes[target])
            ends = sorted({end for *_, span in keepers for end in span}) if size else []
            for window in itertools.pairwise(ends):
                self.add_window(f"{value.name}: layout {target} is kept", size, window, keepers)

    def add_one_keeper(self, value: Value, consumer: int, targets: Integers, span: tuple[int, int]) -> None:
        """The bytes follow from the consumer's choice."""
        distinct, which = np.unique(targets, return_inverse=True)
        if value.bytes[distinct].any():
            node = self.add_node(f"{value.name} is kept", value.bytes[distinct].tolist(), span)
            self.connect(consumer, node, self.same(which, len(distinct)))

    def same(self, which: Integers, count: int) -> Floats:
        """Forbids all but the class of each choice."""
        key = ("same", count, which.tobytes())
        if key not in self.known:
            self.known[key] = np.where(which[:, None] == np.arange(count), 0.0, np.inf)
        return self.known[key]

    def add_window(
        self, name: str, size: float, window: tuple[int, int], keepers: Sequence[tuple[int, Integers, tuple[int, int]]]
    ) -> None:
        """Choices: 2 x (a keeper starts before) + (a keeper stops after); bytes where both."""
        node = self.add_node(name, [0.0, 0.0, 0.0, size], window)
        for c, needed, (start, stop) in keepers:
            before, after = start <= window[0], stop >= window[1]
            known = [not (before and half < 2) and not (after and half % 2 == 0) for half in range(4)]
            if not all(known):
                self.connect(c, node, np.where(needed[:, None] & ~np.array(known), np.inf, 0.0))


def _keepers(value: Value) -> list[tuple[int, Integers, tuple[int, int]]]:
    """(consumer, targets, span) of those that keep it for some time."""
    each = zip(value.consumers, value.targets, value.intervals, strict=True)
    return [(c, targets, span) for c, targets, span in each if span[0] < span[1]]


def extended(pairs: Pairwise, choice: Sequence[int]) -> tuple[int, ...]:
    """`choice` of the first nodes with the cheapest and smallest one of the extra nodes: the lowest that is allowed."""
    full = [int(s) for s in choice] + [0] * (len(pairs.unary) - len(choice))
    floor = [np.zeros(len(pairs.unary[n]), bool) for n in range(len(choice), len(full))]
    for (a, b), cost in zip(pairs.pairs, pairs.costs, strict=True):
        if b >= len(choice):
            floor[b - len(choice)] |= np.isinf(cost[choice[a]])
    for n, forbidden in enumerate(floor, start=len(choice)):
        full[n] = int(np.argmin(forbidden))
    return tuple(full)


# --- which problems are searched so -------------------------------------------------------------------------------


def is_large(problem: Problem) -> bool:
    return len(problem.nodes) >= _LARGE


def suits(problem: Problem) -> bool:
    """Whether contraction will make a large problem small: pairs only, and most of them fenced."""
    if not is_large(problem) or any(len(value.consumers) > 1 for value in problem.values):
        return False
    known: dict[int, bool] = {}
    fenced = 0
    for value in problem.values:
        if id(value.seconds) not in known:
            known[id(value.seconds)] = bool(np.isinf(value.seconds).any())
        fenced += known[id(value.seconds)]
    return fenced > len(problem.values) / 8
