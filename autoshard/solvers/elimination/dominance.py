"""Strategies worth keeping, before elimination: exact reductions of the additive problem.

1. A strategy with an infinite entry, or without a finite partner over some value, goes (to a fixed point).
2. A strategy goes where another of the same node is never more expensive, whatever everyone else does: its cost differs
   by at least what the values could make good (dead-end elimination). One optimum at least is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem, Value
from autoshard.solvers.common.arc_consistency import Fences
from autoshard.solvers.common.clock import Pace
from autoshard.solvers.common.effort import FIRST
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.least_excess import LeastExcess, beaten
from autoshard.solvers.elimination.weighted_sum import Additive, charge, hull, scaled, unary


def reduce(sum_: Additive, contents: Contents, allowed: Sequence[Integers] | None = None) -> list[Integers]:
    """The strategies kept of each node, ascending. `allowed` restricts them beforehand.

    Raises InfeasibleError where a node has none left.
    """
    nodes = _Comparisons(sum_, contents)
    choices = [nodes.same(some) for some in finite(sum_.problem, allowed)]
    stale = set(range(len(choices)))  # asked again, the others would answer the same: what they see is as it was
    for _ in range(FIRST):
        pace = Pace(len(choices))
        for n in range(len(choices)):
            if n not in stale:
                continue
            pace.step(n)
            stale.discard(n)
            some = nodes.undominated(n, choices)
            if len(some) < len(choices[n]):
                choices[n] = some
                stale |= nodes.seen_from(n)
        if not stale:
            break
    return choices


def reduce_nearby(sum_: Additive, contents: Contents, rounds: int) -> list[Integers]:
    """Weaker reduction: what is kept of a node depends on nodes at most `rounds` values away, and on nothing else.

    All nodes are considered together in a round, each against what the others had before it.
    """
    arrays = {id(node.seconds): node.seconds for node in sum_.problem.nodes}
    finite_ = {key: np.flatnonzero(np.isfinite(seconds)) for key, seconds in arrays.items()}
    choices = [finite_[id(node.seconds)] for node in sum_.problem.nodes]
    for node, some in zip(sum_.problem.nodes, choices, strict=True):
        if not len(some):
            raise InfeasibleError(f"{node.name}: none of its {len(node.seconds)} strategies is allowed")
    if not rounds:
        return choices
    nodes = _Comparisons(sum_, contents)
    choices = [nodes.same(some) for some in choices]
    stale = set(range(len(choices)))
    for _ in range(rounds):
        before, pace = list(choices), Pace(len(stale))
        changed = []
        for done, n in enumerate(sorted(stale)):
            pace.step(done)
            choices[n] = nodes.undominated(n, before)
            if len(choices[n]) < len(before[n]):
                changed.append(n)
        stale = set().union(*map(nodes.seen_from, changed))
    return choices


def finite(problem: Problem, allowed: Sequence[Integers] | None = None) -> list[Integers]:
    """Step 1 alone: the strategies that pass arc consistency over every value. Raises InfeasibleError."""
    return [np.flatnonzero(flag) for flag in Fences(problem, allowed).flags]


class _EndExcess(NamedTuple):
    """Excess over a value, by the strategies of a node at one end: `of[s]`, the layout of a strategy; `layouts`, those
    of the kept ones; `least` of the layouts, by their places among these."""

    layouts: Integers
    of: Integers
    least: LeastExcess


class _Comparisons:
    """Comparisons: how much cheaper a node's strategy can be than another over its values; equal ones are made once.

    Lists `kept` are of arrays that `same` gave: alike nodes have one object, and are compared by its address.
    """

    def __init__(self, sum_: Additive, contents: Contents) -> None:
        self.sum, self.contents = sum_, contents
        self.arrays: dict[tuple[str, bytes], Integers] = {}
        self.unary = _unaries(sum_)
        self.produced: list[list[Value]] = [[] for _ in self.unary]
        self.consumed: list[list[tuple[Value, int]]] = [[] for _ in self.unary]
        for value in sum_.problem.values:
            self.produced[value.producer].append(value)
            for position, c in enumerate(value.consumers):
                self.consumed[c].append((value, position))
        self.chosen: dict[tuple[int, int], Integers] = {}
        self.parts: dict[tuple[object, ...], _EndExcess] = {}
        self.least: dict[tuple[object, ...], LeastExcess] = {}
        self.answers: dict[tuple[object, ...], Integers] = {}
        self.survivors: dict[tuple[int, ...], Integers] = {}

    def same(self, array: Integers) -> Integers:
        """The first of equal arrays."""
        return self.arrays.setdefault((array.dtype.str, array.tobytes()), array)

    def layouts(self, of: Integers, choices: Integers) -> Integers:
        """The distinct layouts of the kept strategies, ascending."""
        key = (id(of), id(choices))
        if key not in self.chosen:
            self.chosen[key] = self.same(np.unique(of[choices]))
        return self.chosen[key]

    def seen_from(self, n: int) -> set[int]:
        """The other nodes whose answer depends on what is kept of node n: those that it shares a value with."""
        values = [*self.produced[n], *(value for value, _ in self.consumed[n])]
        return {other for value in values for other in (value.producer, *value.consumers)} - {n}

    def undominated(self, n: int, choices: Sequence[Integers]) -> Integers:
        """The strategies of node n without a rival in `choices` that never costs more; of equals the lowest stays."""
        alive = choices[n]
        if len(alive) < 2:
            return alive
        parts = [self.as_producer(value, choices) for value in self.produced[n]]
        parts += [self.as_consumer(value, position, choices) for value, position in self.consumed[n]]
        known = (id(self.unary[n]), id(alive), *map(id, parts))
        if known not in self.survivors:
            self.survivors[known] = self.same(alive[self.answer(self.unary[n][alive], alive, parts)])
        return self.survivors[known]

    def answer(self, cost: Floats, alive: Integers, parts: Sequence[_EndExcess]) -> Integers:
        """The places in `alive`, of strategies that cost `cost` by themselves, that stay."""
        rows = [np.searchsorted(part.layouts, part.of[alive]) for part in parts]
        key = (cost.tobytes(), *((id(part.least), r.tobytes()) for part, r in zip(parts, rows, strict=True)))
        if key not in self.answers:
            self.answers[key] = _survivors(beaten(cost, [(part.least, r) for part, r in zip(parts, rows, strict=True)]))
        return self.answers[key]

    def as_producer(self, value: Value, choices: Sequence[Integers]) -> _EndExcess:
        """Excess costs of the layouts that the producer leaves."""
        ends = [(id(t), id(choices[c])) for c, t in zip(value.consumers, value.targets, strict=True)]
        known = (id(value.seconds), id(value.source), id(choices[value.producer]), *ends)
        if known not in self.parts:
            rows = self.layouts(value.source, choices[value.producer])
            cols = [self.layouts(t, choices[c]) for c, t in zip(value.consumers, value.targets, strict=True)]
            key = ("producer", self.contents.number(value.seconds), id(rows), *map(id, cols))
            if key not in self.least:
                seconds = scaled(self.sum, value.seconds)
                # a target may be shared: then only its cheaper side is certain
                self.least[key] = LeastExcess([seconds[np.ix_(rows, c)] for c in cols], clipped=len(cols) > 1)
            self.parts[known] = _EndExcess(rows, value.source, self.least[key])
        return self.parts[known]

    def as_consumer(self, value: Value, i: int, choices: Sequence[Integers]) -> _EndExcess:
        """Excess costs of the target layouts of consumer i."""
        targets, mine = value.targets[i], choices[value.consumers[i]]
        shared = len(value.consumers) > 1
        per_byte = charge(self.sum, hull(value) if shared else value.intervals[i])
        prices = (id(value.seconds), shared, per_byte, id(value.bytes) if per_byte else -1)
        known = (*prices, id(value.source), id(choices[value.producer]), id(targets), id(mine))
        if known not in self.parts:
            rows, cols = self.layouts(value.source, choices[value.producer]), self.layouts(targets, mine)
            sizes = self.contents.number(value.bytes) if per_byte else -1
            key = ("consumer", self.contents.number(value.seconds), shared, per_byte, sizes, id(rows), id(cols))
            if key not in self.least:
                pay = scaled(self.sum, value.seconds)[np.ix_(rows, cols)]
                pay = pay + per_byte * value.bytes[cols] if per_byte else pay
                if shared:  # the target that costs more may be there for another consumer already, the other may not
                    least = np.broadcast_to(-pay.max(axis=0), (len(cols), len(cols))).copy()
                    np.fill_diagonal(least, 0.0)
                    self.least[key] = LeastExcess([], least)
                else:
                    self.least[key] = LeastExcess([np.ascontiguousarray(pay.T)])
            self.parts[known] = _EndExcess(cols, targets, self.least[key])
        return self.parts[known]


def _unaries(sum_: Additive) -> list[Floats]:
    """Unary costs of each node's strategies; equal arrays are one object."""
    known: dict[tuple[int, int, float], Floats] = {}
    owns: dict[bytes, Floats] = {}
    costs = []
    for n, node in enumerate(sum_.problem.nodes):
        key = (id(node.seconds), id(node.bytes), charge(sum_, node.interval))
        if key not in known:
            cost = unary(sum_, n)
            known[key] = owns.setdefault(cost.tobytes(), cost)
        costs.append(known[key])
    return costs


def _survivors(beaten: NDArray[np.bool_]) -> Integers:
    """Positions left after removing, from the last, each that some other remaining one is never more expensive than."""
    alive = np.ones(len(beaten), bool)
    for s in np.flatnonzero(beaten.any(axis=1))[::-1]:
        if (beaten[s] & alive).any():
            alive[s] = False
    return np.flatnonzero(alive)
