"""Sharding propagation: from what a user pinned, breadth first, every node takes what moves the least.

After MindSpore's search_mode "sharding_propagation" (its annotated operators are our pins), at the problem's level:

- The pins are decided first. Where a connected part has none, it starts at its costliest node, in the choice that is
  cheapest together with the best of its neighbours.
- The queue holds the nodes next to decided ones, consumers before producers. A node whose producers are in the queue
  too waits for them once. It takes the choice with the least redistribution to its decided neighbours; ties by its own
  cost. Without any pin there is nothing to propagate: then the least of redistribution and own cost together.
- A conflict is a node whose decided neighbours would each have another choice, no choice being best for all: it takes
  the cheapest in total, and is reported.
- A choice that leaves some other node without any is never taken (see `arc_consistency.py`). Overflow of memory is
  mended by single moves (`memory_repair.py`).

Greedy: the bound is that of one round of messages. Linear in the number of nodes and values.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Floats, Integers, Problem, Value, memory, objective
from autoshard.solvers.common.arc_consistency import Fences
from autoshard.solvers.common.clock import Pace
from autoshard.solvers.common.local_search import Choice, Links, links
from autoshard.solvers.common.memory_repair import repaired
from autoshard.solvers.common.restrict import original, restricted
from autoshard.solvers.common.result import Solution, finish, fits
from autoshard.solvers.common.solver_options import Options
from autoshard.solvers.relax.memory_columns import condensed
from autoshard.solvers.relax.memory_presolve import infeasible
from autoshard.solvers.relax.trws_layouts import message_bound
from autoshard.units import ROUNDING


@dataclass(frozen=True)
class Conflict:
    """`node` had no choice that was best for all of `neighbours` (nodes); `taken`: its choice, the cheapest in total.

    `wanted[i]`: the choice that is best for neighbour i alone; `seconds[i]`: what the one taken costs there beyond it.
    """

    node: int
    neighbours: tuple[int, ...]
    wanted: tuple[int, ...]
    seconds: tuple[float, ...]
    taken: int


@dataclass(frozen=True)
class Propagated:
    """`decided[n]`: "pinned", "start", "propagated", "conflict", or "repaired" (moved to fit the memory)."""

    choice: Choice
    decided: tuple[str, ...]
    conflicts: tuple[Conflict, ...]


def solve(problem: Problem, options: Options) -> Solution:
    """Raises InfeasibleError where it finds no plan that is allowed and fits (which proves nothing)."""
    started = time.perf_counter()
    propagated = propagate(problem, options.pinned)
    return finish(problem, propagated.choice, message_bound(problem), "propagation", started)


def propagate(problem: Problem, pinned: Mapping[int, int]) -> Propagated:
    """Every node's choice from those of the `pinned` ones, and who decided it. Raises InfeasibleError as `solve`."""
    small = condensed(restricted(problem, pinned))
    run = _Run(small, dict.fromkeys(pinned, 0))
    run.all()
    if math.isinf(objective(small, run.choice)):
        raise InfeasibleError(
            "propagation met choices that exclude each other; that no plan exists is not proven",
            "--solver auto, or other pins",
            proven=False,
        )
    choice: Choice | None = tuple(run.choice)
    if not fits(memory(small, run.choice).max(initial=0.0), small.capacity_bytes):
        choice = repaired(small, run.choice)
    if choice is None:
        raise infeasible(small, proven=False)
    decided = [
        "repaired" if new != old else label for new, old, label in zip(choice, run.choice, run.decided, strict=True)
    ]
    return Propagated(original(choice, pinned), tuple(decided), tuple(run.conflicts))


class _Run:
    """`choice[n]` is -1 until node n is decided."""

    def __init__(self, problem: Problem, pinned: Mapping[int, int]) -> None:
        self.problem, self.linked = problem, links(problem)
        self.fences = Fences(problem)
        self.adds_costs = not pinned
        self.choice = [-1] * len(problem.nodes)
        self.decided = [""] * len(problem.nodes)
        self.conflicts: list[Conflict] = []
        self.queue: deque[int] = deque()
        self.queued: set[int] = set()
        self.waited: set[int] = set()
        self.done, self.pace = 0, Pace(len(problem.nodes))
        for n, s in sorted(pinned.items()):
            self.decide(n, s, "pinned")
        for n in sorted(pinned):
            self.spread(n)

    def all(self) -> None:
        self.drain()
        cost = np.array([node.seconds[np.isfinite(node.seconds)].min(initial=np.inf) for node in self.problem.nodes])
        for n in np.argsort(-cost, kind="stable"):
            if self.choice[n] < 0:
                self.decide(int(n), start(self.problem, self.linked, self.fences, int(n)), "start")
                self.spread(int(n))
                self.drain()

    def decide(self, n: int, s: int, label: str) -> None:
        self.choice[n], self.decided[n] = s, label
        self.done += 1
        if self.fences.of[n]:
            self.fences.fix(n, s)

    def spread(self, n: int) -> None:
        """Queues the undecided neighbours: consumers, then producers, then those that consume the same value."""
        near = [c for value in self.linked.produced[n] for c in value.consumers]
        near += [value.producer for value, _ in self.linked.consumed[n]]
        for m in near:
            if self.choice[m] < 0 and m not in self.queued:
                self.queued.add(m)
                self.queue.append(m)

    def drain(self) -> None:
        while self.queue:
            self.pace.step(self.done)
            n = self.queue.popleft()
            ahead = any(
                self.choice[value.producer] < 0 and value.producer in self.queued
                for value, _ in self.linked.consumed[n]
            )
            if ahead and n not in self.waited:
                self.waited.add(n)
                self.queue.append(n)
                continue
            self.follow(n)
            self.spread(n)

    def follow(self, n: int) -> None:
        """Decides node n by its decided neighbours."""
        costs = np.where(self.fences.flags[n], self.problem.nodes[n].seconds, np.inf)
        demands = self.demands(n)
        moved = np.sum([pay for _, pay in demands], axis=0) if demands else np.zeros(len(costs))
        moved = np.where(np.isinf(costs), np.inf, moved)
        if not np.isfinite(moved).any():  # earlier choices exclude each other: said at the end
            self.decide(n, int(np.argmin(self.problem.nodes[n].seconds)), "conflict")
            return
        least = [np.where(np.isinf(costs), np.inf, pay) for _, pay in demands]
        best = [pay <= pay.min() + ROUNDING * _scale(pay) for pay in least]
        if best and not np.logical_and.reduce(best).any():
            taken = int(np.argmin(moved + costs))
            self.report(n, taken, demands, least, costs)
            self.decide(n, taken, "conflict")
            return
        aim = moved + costs if self.adds_costs else moved
        near = aim <= aim.min() + ROUNDING * _scale(aim)
        self.decide(n, int(np.argmin(np.where(near, costs, np.inf))), "propagated")

    def report(
        self, n: int, taken: int, demands: Sequence[tuple[int, Floats]], least: Sequence[Floats], costs: Floats
    ) -> None:
        wanted = []
        for pay in least:
            near = pay <= pay.min() + ROUNDING * _scale(pay)
            wanted.append(int(np.argmin(np.where(near, costs, np.inf))))
        more = tuple(float(pay[taken] - pay[s]) for pay, s in zip(least, wanted, strict=True))
        self.conflicts.append(Conflict(n, tuple(m for m, _ in demands), tuple(wanted), more, taken))

    def demands(self, n: int) -> list[tuple[int, Floats]]:
        """(neighbour, seconds of redistribution of each choice of node n), for every decided neighbour."""
        demands = []
        for value, position in self.linked.consumed[n]:
            if self.choice[value.producer] >= 0:
                demands.append((value.producer, self.as_consumer(value, position)))
        for value in self.linked.produced[n]:
            paid: set[int] = set()
            for c, targets in zip(value.consumers, value.targets, strict=True):
                target = int(targets[self.choice[c]]) if self.choice[c] >= 0 else -1
                if target >= 0 and target not in paid:
                    paid.add(target)
                    demands.append((c, value.seconds[:, target][value.source]))
        return demands

    def as_consumer(self, value: Value, position: int) -> Floats:
        """Cost of each target layout for this consumer: 0 where another one has it made already."""
        pay = value.seconds[value.source[self.choice[value.producer]]].copy()
        for i, (c, targets) in enumerate(zip(value.consumers, value.targets, strict=True)):
            if i != position and self.choice[c] >= 0 and math.isfinite(pay[targets[self.choice[c]]]):
                pay[targets[self.choice[c]]] = 0.0
        return np.asarray(pay[value.targets[position]])


def _scale(pay: Floats) -> float:
    finite = pay[np.isfinite(pay)]
    return float(finite.max(initial=0.0))


def start(problem: Problem, linked: Links, fences: Fences, n: int) -> int:
    """The choice of node n that is cheapest together with the best choice of each neighbour by itself."""
    total = np.where(fences.flags[n], problem.nodes[n].seconds, np.inf)
    for value in linked.produced[n]:
        rows, columns = value.seconds.shape
        pay = np.zeros(rows)
        for c, targets in zip(value.consumers, value.targets, strict=True):
            costs = np.where(fences.flags[c], problem.nodes[c].seconds, np.inf)
            pay += (value.seconds / len(value.consumers) + _by_layout(costs, targets, columns)).min(axis=1)
        total = total + pay[value.source]
    for value, position in linked.consumed[n]:
        costs = np.where(fences.flags[value.producer], problem.nodes[value.producer].seconds, np.inf)
        least = _by_layout(costs, value.source, len(value.seconds))
        total = total + (value.seconds + least[:, None]).min(axis=0)[value.targets[position]]
    return int(np.argmin(total))


def _by_layout(seconds: Floats, layouts: Integers, count: int) -> Floats:
    """The least of `seconds[s]` over the choices s of each layout; inf where a layout has none."""
    least = np.full(count, np.inf)
    np.minimum.at(least, layouts, seconds)
    return least
