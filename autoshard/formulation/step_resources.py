"""Occupation of a step's resources by a plan: a lower bound on how long the simulated step takes.

A resource is a set of tasks of which the schedule runs no two at once: the computations of a device; what goes over one
mesh axis, or over one kind of link; the host, which issues all tasks; a path of operators that wait for each other;
what the program runs in a row. One more is that with computations slowed as they are by a busy link (`slowed_rows`).
Backward begins when the loss is there. So with F_x(s) the seconds that the forward of plan s occupies resource x, and
B_y(s) those of its backward and optimizer on resource y, a step takes at least F_x(s) + B_y(s), for all x and y that
follow each other, and so at least any mean of these. Each mean is additive over the choices. The host runs ahead: it
issues the backward while the devices still compute the forward, so its backward follows its own forward alone
(`follows`).

Never more is counted than what runs. Each of several readers of a value pays an equal part of the redistribution to its
layout. Collectives that may go together with others, the gathers of weights and the sums of their gradients, count in
parallel to all else at the rate of large messages, plus the certain costs of each weight (`weight_tasks`). Weights of a
block are gathered again for backward, except in the block used last, so one block's are deducted. The sum of an input's
gradient counts as far as the weight product of a linear that reads it can't hide it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.formulation.formulate import Formulation
from autoshard.formulation.resource_tables import COMPUTE, HOST, IN_ORDER, IN_ROW, PATH, ResourceTables
from autoshard.formulation.slowed_rows import SLOWED, SlowedRows
from autoshard.ir.problem import MANY, SLAB, Floats, Integers, Node, Problem, Value, changed

LEAD = "host, then serial execution"  # see host_lead.py


def follows(names: Sequence[str]) -> NDArray[np.bool_]:
    """[x, y]: does the backward's use of y come after all of the forward's use of x?"""
    host = np.array([name == HOST for name in names])
    issued = np.array([name in (HOST, LEAD) for name in names])
    after: NDArray[np.bool_] = host[:, None] | ~issued[None, :]
    return after


def pair_seconds(used: Floats) -> Floats:
    """[x, y]: seconds of the forward on x plus the backward on y, (..., 2 R) -> (..., R, R)."""
    count = used.shape[-1] // 2
    return used[..., :count, None] + used[..., None, count:]


@dataclass(frozen=True, eq=False)
class Reader:
    """One reader of value `value`: its part of the redistribution's occupation, (2 x resources, sources, targets), or
    the rows of it in `StepResources.picked`."""

    value: int
    position: int
    seconds: Floats
    hub: bool


@dataclass(frozen=True, eq=False)
class StepResources:
    """`names` of the resources, R of them. Arrays begin with the R of the forward, then the R of the backward.

    `constants`: occupied by every plan; `nodes[n]`, shape (2 R, choices); `readers` pay parts of the values'
    redistributions, and `values[v]`, shape (2 R, sources, targets), is the whole of each. `spared`: deduction from the
    constants, for the block whose weights are not gathered again; `spared_cast`: for cast weights alone.

    `picked`: if resources are rows of others, for each node, then for each reader, the row of its array that is each of
    the 2 R resources, -1 if it occupies nothing; `values` are then of the others alone.
    """

    problem: Problem
    names: tuple[str, ...]
    constants: Floats
    nodes: tuple[Floats, ...]
    readers: tuple[Reader, ...]
    values: tuple[Floats, ...]
    spared: Floats
    spared_cast: Floats
    picked: tuple[tuple[Integers, ...], tuple[Integers, ...]] | None = None

    def longest(self, used: Floats) -> float:
        """Longest occupation of two resources that follow each other."""
        return float(pair_seconds(used)[follows(self.names)].max())

    def least_used(self, choice: Sequence[int]) -> Floats:
        """Lower bound on the seconds that a plan occupies each resource, shape (2 R,)."""
        total = self._of_nodes(choice)
        for reader, rows in zip(self.readers, self._rows(1), strict=True):
            value = self.problem.values[reader.value]
            target = value.targets[reader.position][choice[value.consumers[reader.position]]]
            total += _taken(reader.seconds[:, value.source[choice[value.producer]], target], rows)
        return total

    def _rows(self, of_readers: Literal[0, 1]) -> Sequence[Integers | None]:
        """Rows `picked` for each node or reader; None for all rows, in order."""
        return self.picked[of_readers] if self.picked else [None] * len(self.readers if of_readers else self.nodes)

    def roughly_used(self, choice: Sequence[int]) -> Floats:
        """Probable seconds that a plan occupies each resource: each layout that is needed is paid once, whole."""
        total = self._of_nodes(choice)
        for value, table in zip(self.problem.values, self.values, strict=True):
            targets = {int(t[choice[c]]) for c, t in zip(value.consumers, value.targets, strict=True)}
            paid = table[:, value.source[choice[value.producer]]]
            total += paid[:, sorted(targets)].sum(axis=1) if len(targets) > 1 else paid[:, targets.pop()]
        slowed = [name.startswith(SLOWED) for name in self.names]
        total[np.tile(slowed, 2)] = 0.0  # what runs in a row has its part of it, as it probably is
        return total

    def _of_nodes(self, choice: Sequence[int]) -> Floats:
        total = self.constants.copy()
        for table, s, rows in zip(self.nodes, choice, self._rows(0), strict=True):
            total += _taken(table[:, s], rows)
        return total

    def bounding(self, weights: Floats) -> Problem:
        """The problem whose minimum, plus `weights @ constants`, is at most the step of any plan.

        `weights`, on the resources of each phase: for pairs that follow each other, not negative and at most 1 in sum.
        Memory is left out. Equal arrays stay one object.
        """
        mean = _Means(weights, self._forbidding)
        nodes = zip(self.nodes, self.problem.nodes, self._rows(0), strict=True)
        unary = [mean.of(table, node.seconds, rows) for table, node, rows in nodes]
        values = []
        for reader, rows in zip(self.readers, self._rows(1), strict=True):
            value = self.problem.values[reader.value]
            pairs, target = mean.of(reader.seconds, value.seconds, rows), value.targets[reader.position]
            consumer = value.consumers[reader.position]
            if reader.hub:
                unary[consumer] = mean.with_least(unary[consumer], pairs, target)
            elif mean.pays(pairs):
                ends = (value.producer, (consumer,), value.source, (target,))
                values.append(Value(value.name, *ends, pairs, mean.zeros(pairs.shape[1]), ((0, 0),)))
        pairs_ = zip(self.problem.nodes, unary, strict=True)
        return Problem(tuple(Node(node.name, costs, mean.zeros(len(costs))) for node, costs in pairs_), tuple(values))

    @cached_property
    def _forbidding(self) -> frozenset[int]:
        """The addresses of the problem's seconds that forbid some choice or pair."""
        arrays = {id(node.seconds): node.seconds for node in self.problem.nodes}
        arrays |= {id(value.seconds): value.seconds for value in self.problem.values}
        return frozenset(key for key, seconds in arrays.items() if np.isinf(seconds).any())

    def cut_off(self, values: Collection[int]) -> StepResources:
        """Copy in whose bounds these values, too, are separated from their readers."""
        if all(reader.hub or reader.value not in values for reader in self.readers):
            return self
        readers = (replace(reader, hub=reader.hub or reader.value in values) for reader in self.readers)
        return replace(self, readers=tuple(readers))

    def likely(self, weights: Floats, added: float = 0.0) -> Problem:
        """Problem of the mean of the probable use, without the constants: with the structure and the memory of the
        problem. `added`: the share in it of the problem's own costs, in which nothing overlaps."""
        mean = _Means((1.0 - added) * weights, self._forbidding, added)
        nodes = zip(self.problem.nodes, self.nodes, strict=True)
        values = zip(self.problem.values, self.values, strict=True)
        return replace(
            self.problem,
            nodes=tuple(changed(node, seconds=mean.of(table, node.seconds)) for node, table in nodes),
            values=tuple(changed(value, seconds=mean.of(table, value.seconds)) for value, table in values),
        )


def in_a_row(resources: StepResources) -> Floats:
    """Weights that put all weight on what the program runs in a row, forward and backward."""
    return np.tile(np.array([name == IN_ROW for name in resources.names], float), 2)


class _Means:
    """Arrays of weighted means, each made once; forbidden choices stay forbidden. `forbidding`: the addresses of arrays
    that forbid something."""

    def __init__(self, weights: Floats, forbidding: frozenset[int], added: float = 0.0) -> None:
        self.weights, self.forbidding, self.added = weights, forbidding, added
        self.known: dict[Hashable, tuple[Floats, object]] = {}  # with what its key names
        self.paid: dict[int, bool] = {}
        self.of_picked: dict[Hashable, tuple[Floats, Integers]] = {}

    def of(self, seconds: Floats, allowed: Floats, rows: Integers | None = None) -> Floats:
        """Weighted mean. `allowed`: the seconds of which a part is added; infinite if a choice or pair is forbidden.
        `rows`: those of `seconds` that are weighted, see `StepResources.picked`."""
        weights = self.weights if rows is None else self.of_rows(rows, len(seconds))
        key = (id(seconds), id(allowed), weights.tobytes())
        if key not in self.known:
            mean = _mean(weights, seconds)
            if id(allowed) in self.forbidding:
                forbidden = np.isinf(allowed)
                mean = mean + self.added * np.where(forbidden, 0.0, allowed) if self.added else mean
                mean = np.where(forbidden, np.inf, mean)
            elif self.added:
                mean = mean + self.added * allowed
            self.known[key] = mean, (seconds, allowed)
        return self.known[key][0]

    def of_rows(self, rows: Integers, count: int) -> Floats:
        """Weights of the `count` rows from which `rows` are picked."""
        key = (id(rows), count)
        if key not in self.of_picked:
            there = rows >= 0
            self.of_picked[key] = np.bincount(rows[there], self.weights[there], count).astype(float), rows
        return self.of_picked[key][0]

    def with_least(self, unary: Floats, pairs: Floats, target: Integers) -> Floats:
        key = (id(unary), id(pairs), id(target))
        if key not in self.known:
            self.known[key] = unary + pairs.min(axis=0)[target], (unary, pairs, target)
        return self.known[key][0]

    def pays(self, pairs: Floats) -> bool:
        """Does any of them cost something? `pairs` is a result of `of`."""
        if id(pairs) not in self.paid:
            self.paid[id(pairs)] = bool(pairs.any())
        return self.paid[id(pairs)]

    def zeros(self, count: int) -> Floats:
        return self.known.setdefault(count, (np.zeros(count), None))[0]


def _mean(weights: Floats, seconds: Floats) -> Floats:
    """Weighted mean in pieces that stay in the cache: most weights are 0, and tables of three axes are gigabytes."""
    total, rows = np.zeros(math.prod(seconds.shape[1:])), np.flatnonzero(weights)
    entries, buffer = seconds.reshape(len(seconds), -1), np.empty(min(SLAB, len(total)))
    for low in range(0, len(total), SLAB):
        piece = total[low : low + SLAB]
        for row in rows:
            piece += np.multiply(weights[row], entries[row, low : low + SLAB], out=buffer[: len(piece)])
    return total.reshape(seconds.shape[1:])


def _taken(column: Floats, rows: Integers | None) -> Floats:
    return column if rows is None else np.append(column, 0.0)[rows]  # -1 is the last


def step_resources(formulation: Formulation, *, in_order: bool = IN_ORDER, fused: bool = False) -> StepResources:
    """Resources of the steps of all plans. Without `in_order` they bound any schedule, whatever it overlaps. `fused`:
    the plan says which collectives go together."""
    problem, tables = formulation.problem, ResourceTables(formulation, in_order, fused)
    rows = SlowedRows(tables.names, tables.slowdown)
    nodes = tuple(rows.of(tables.node(n)) for n in range(len(problem.nodes)))
    readers = tuple(
        Reader(v, at, rows.of(tables.part(v, at)), len(value.consumers) > MANY and not tables.on_path(v, at))
        for v, value in enumerate(problem.values)
        for at in range(len(value.consumers))
    )
    values = tuple(rows.of(tables.whole(v), slowed=False) for v in range(len(problem.values)))
    spared, cast = rows.of(tables.stays_whole()), rows.of(tables.stays_whole(cast=True))
    constants = rows.of(tables.constants()) - spared
    return StepResources(problem, rows.names, constants, nodes, readers, values, spared, cast)


__all__ = ["COMPUTE", "HOST", "IN_ROW", "LEAD", "PATH", "Reader", "StepResources", "follows", "in_a_row",
           "pair_seconds", "step_resources"]  # fmt: skip
