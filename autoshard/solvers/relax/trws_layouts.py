"""Lower bounds of an additive problem by messages between its nodes, and what each choice seems to cost.

Sequential tree-reweighted message passing (Kolmogorov, TPAMI 2006), over layouts: a message costs the size of the table
of a value, not the product of its ends' choices. Of a value with k consumers each pays a share of its target; the
shares of a target add up to 1, so that the sum stays below what is paid once. At first they are even, or follow what
consumers are charged for bytes; then they move to those that need the target.

    M_{n -> m}(t) = min_r [ share x b_v(r, t) + min_{x in r} ( g_n belief_n(x) - M_{m -> n}(r) ) ]

from layouts r to layouts t (or back); beliefs and bound as below. Implemented in
`trws_layouts.Beliefs._send`, a round both ways in `trws_layouts.Beliefs.round`; the shares move in
`trws_layouts.Beliefs.shift`.

A sweep's sum is a bound whatever messages it begins with, for what it leaves out of a sum that is the objective is not
below zero. So what rounding adds is that of one sweep: with N nodes and E edges no more than 3 N + 5 E operations on
numbers up to the largest met, `peak`, each off by half of eps, and N + E additions to the sum.

The step that it is made of:

A node sends its neighbours what each of their choices costs at least on its side:

    belief_n(x) = a_n(x) + sum over neighbours m of M_{m -> n}(x)
    M_{n -> m}(y) = min_x [ b_nm(x, y) + g_n belief_n(x) - M_{m -> n}(x) ]
    g_n = 1 / max(edges forwards, edges backwards)
    bound = sum of the minima of beliefs and messages, each taken out where it is met

Implemented in `trws_layouts.send_messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from autoshard.ir.problem import Floats, Integers, Problem, Value
from autoshard.solvers.common import clock
from autoshard.solvers.common.effort import ROUNDS
from autoshard.solvers.elimination.weighted_sum import Additive, additive, charge, scaled, unary

_OTHERS = 0.05  # of the longest charge, for who keeps nothing


class _Edge(NamedTuple):
    """Consumer `position` of a value: the ends, the layout of each choice, seconds [source, target] and transposed."""

    value: int
    position: int
    producer: int
    consumer: int
    source: Integers
    target: Integers
    there: Floats
    back: Floats


class Beliefs:
    """The state of the messages. `bound` only rises; every one is valid. `kind`: float32 where beliefs rank choices
    and no bound is asked for: tables are half as large."""

    def __init__(self, sum_: Additive, kind: type[np.floating[Any]] = np.float64) -> None:
        self.sum, self.kind = sum_, kind
        unaries = [unary(sum_, n) for n in range(len(sum_.problem.nodes))]
        self.penalty = _penalty(sum_, unaries)
        self.unary = [np.where(np.isinf(costs), self.penalty, costs).astype(kind) for costs in unaries]
        self.before: list[list[int]] = [[] for _ in unaries]
        self.after: list[list[int]] = [[] for _ in unaries]
        self.tables: dict[tuple[object, ...], tuple[Floats, Floats]] = {}
        self.weights = [_weights(sum_, value) for value in sum_.problem.values]
        self.shares = {
            v: np.repeat((weights / weights.sum())[:, None], len(value.bytes), axis=1)
            for v, (weights, value) in enumerate(zip(self.weights, sum_.problem.values, strict=True))
        }
        self.edges: list[_Edge] = []
        for v, value in enumerate(sum_.problem.values):
            for i, (c, target) in enumerate(zip(value.consumers, value.targets, strict=True)):
                self.after[min(value.producer, c)].append(len(self.edges))
                self.before[max(value.producer, c)].append(len(self.edges))
                self.edges.append(_Edge(v, i, value.producer, c, value.source, target, *self.table(v, value, i)))
        self.share = [1.0 / max(len(b), len(a), 1) for b, a in zip(self.before, self.after, strict=True)]
        self.to_producer = [np.zeros(len(unaries[e.producer]), kind) for e in self.edges]
        self.to_consumer = [np.zeros(len(unaries[e.consumer]), kind) for e in self.edges]
        self.bound, self.rounds, self.peak = -np.inf, 0, self.penalty

    def table(self, v: int, value: Value, i: int) -> tuple[Floats, Floats]:
        """Cost that consumer i pays of the value by its shares; equal tables are one."""
        per_byte, shares = charge(self.sum, value.intervals[i]), self.shares[v][i]
        key = (id(value.seconds), per_byte, id(value.bytes) if per_byte else 0, shares.tobytes())
        if key not in self.tables:
            pay = scaled(self.sum, value.seconds)
            pay = pay + per_byte * value.bytes if per_byte else pay
            table = _shared_out(pay, self.penalty, shares).astype(self.kind)
            self.tables[key] = table, np.ascontiguousarray(table.T)
        return self.tables[key]

    def round(self) -> float:
        """Send one sweep each way; returns the bound so far."""
        count = len(self.unary)
        for nodes, send in ((range(count), self.after), (range(count - 1, -1, -1), self.before)):
            bound = sum(self._send(n, send[n]) for n in nodes)
            self.bound = max(self.bound, bound - self.rounding(bound))
        self.rounds += 1
        return self.bound

    def rounding(self, total: float) -> float:
        """Largest rounding error of the sum of a sweep."""
        operations = 4 * len(self.unary) + 6 * len(self.edges)  # with the additions to the sum
        return operations * float(np.finfo(self.kind).eps / 2) * (self.peak + abs(total))

    def _send(self, n: int, edges: list[int]) -> float:
        """Messages from node n over these edges; what they raise the bound by."""
        clock.check()

        def message(e: int, belief: Floats) -> Floats:
            edge = self.edges[e]
            if n == edge.producer:
                costs = _least(belief - self.to_producer[e], edge.source, len(edge.there))
                reason: Floats = (edge.back + costs).min(axis=1)
                return reason[edge.target]
            costs = _least(belief - self.to_consumer[e], edge.target, len(edge.back))
            reason = (edge.there + costs).min(axis=1)
            return reason[edge.source]

        def keep(e: int, sent: Floats) -> None:
            self.peak = max(self.peak, float(sent.max()))
            (self.to_consumer if n == self.edges[e].producer else self.to_producer)[e] = sent

        belief = self.belief(n)
        self.peak = max(self.peak, float(belief.max()), -float(belief.min()))
        return send_messages(belief, self.share[n], edges, message, keep)

    def belief(self, n: int) -> Floats:
        """Cost of each choice of a node, up to a constant, as far as the messages show."""
        total = self.unary[n].copy()
        for e in (*self.before[n], *self.after[n]):
            total += self.to_producer[e] if self.edges[e].producer == n else self.to_consumer[e]
        return total

    def shift(self) -> None:
        """Shares of a target go part of the way to an even split among the consumers that now seem to need it."""
        step = 0.5 * ROUNDS / (ROUNDS + self.rounds)  # half of the way at first, then less
        favourite = [int(self.belief(n).argmin()) for n in range(len(self.unary))]
        self.tables.clear()
        moved: dict[int, Floats] = {}
        for v, value in enumerate(self.sum.problem.values):
            if len(value.consumers) > 1:
                wanted = self.shares[v].copy()
                chosen = np.array([t[favourite[c]] for c, t in zip(value.consumers, value.targets, strict=True)])
                for target in np.unique(chosen):
                    users = (chosen == target) * self.weights[v]
                    wanted[:, target] = users / users.sum()
                moved[v] = self.shares[v] + step * (wanted - self.shares[v])
        self.shares |= moved
        for e, edge in enumerate(self.edges):
            if edge.value in moved:
                there, back = self.table(edge.value, self.sum.problem.values[edge.value], edge.position)
                self.edges[e] = edge._replace(there=there, back=back)


def message_bound(problem: Problem) -> float:
    """Seconds that no plan is below, whatever its memory: of one round, in linear time. 0 where there is no time."""
    return max(0.0, clock.attempt(Beliefs(additive(problem)).round) or 0.0)


def _shared_out(pay: Floats, penalty: float, shares: Floats) -> Floats:
    """Shares of what is paid, with the penalty where it is forbidden: most tables forbid nothing, and go to one."""
    if not np.isfinite(pay.max(initial=0.0)):
        pay = np.where(np.isinf(pay), penalty, pay)
    return pay if (shares == 1.0).all() else pay * shares


def _weights(sum_: Additive, value: Value) -> Floats:
    """Weights of the consumers: who keeps a target for longest pays most of it, so that together they pay what is
    charged."""
    charges = np.array([charge(sum_, interval) for interval in value.intervals])
    return charges + _OTHERS * charges.max() if charges.any() else np.ones(len(charges))


def _least(costs: Floats, layouts: Integers, count: int) -> Floats:
    """The least of the choices of each layout; where a layout has none, more than any."""
    least = np.full(count, np.finfo(costs.dtype).max / 4, costs.dtype)
    np.minimum.at(least, layouts, costs)
    return least


def _penalty(sum_: Additive, unaries: list[Floats]) -> float:
    """Penalty for what is forbidden: more than any allowed plan costs. Bounds are then low, never too high."""

    def most(table: Floats) -> float:
        largest = float(table.max(initial=0.0))
        return largest if np.isfinite(largest) else float(table[np.isfinite(table)].max(initial=0.0))

    known = {id(value.seconds): most(value.seconds) for value in sum_.problem.values}
    seconds = sum(len(value.consumers) * known[id(value.seconds)] for value in sum_.problem.values)
    top = float(sum_.cumulative[-1]) if len(sum_.cumulative) else 0.0
    memory_cost = top * sum(float(value.bytes.max(initial=0.0)) * len(value.consumers) for value in sum_.problem.values)
    return 1.0 + 2.0 * (sum(map(most, unaries)) + sum_.scale * seconds + memory_cost)


Edge = TypeVar("Edge")


def send_messages(
    belief: Floats,
    share: float,
    edges: Iterable[Edge],
    message: Callable[[Edge, Floats], Floats],
    keep: Callable[[Edge, Floats], None],
) -> float:
    """Messages over these edges of one node, from its belief (changed in place); what they raise the bound by.

    `message`: of an edge, from g_n (belief - its least); `keep` stores it with its least taken out.
    """
    least = belief.min()
    total = float(least)
    belief -= least
    belief *= share
    for edge in edges:
        sent = message(edge, belief)
        least = sent.min()
        total += float(least)
        sent -= least
        keep(edge, sent)
    return total
