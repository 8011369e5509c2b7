"""Recursive bisection: a heuristic in near-linear time, for graphs of any width and 10^5 nodes.

After the double recursion of MindSpore's "recursive_programming", but the graph is split, not the device count: at the
level of the problem a choice is opaque. The nodes stand in a line (a stored tensor before its first consumer, a sink
behind its producer). The line is cut near its middle, where the fewest values cross. The window around the cut is
solved exactly (see minimise.py), given what is decided already, without what is beyond it; that decides the ends of the
values that cross, and the two halves, then separate but for long values, are treated in the same way. A piece as small
as a window is decided whole. Then every window is solved once more, all around it being known, and single nodes move
where that is cheaper. Windows with equal content are solved once.

Memory: the same on node costs of seconds + price x bytes, the price found by bisection, then single moves
(`memory_repair.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Integers, Node, Problem, Value, memory, objective
from autoshard.solvers.common.arc_consistency import Fences
from autoshard.solvers.common.effort import SMALL_ENTRIES
from autoshard.solvers.common.local_search import Aim, Choice, descend, line, links
from autoshard.solvers.common.memory_repair import repaired
from autoshard.solvers.common.result import Solution, finish, fits
from autoshard.solvers.common.solver_options import Clock, Options
from autoshard.solvers.elimination.cost_tables import Contents
from autoshard.solvers.elimination.minimise import minimise
from autoshard.solvers.relax.memory_columns import condensed
from autoshard.solvers.relax.memory_presolve import infeasible
from autoshard.solvers.relax.trws_layouts import message_bound

_HALF = 32  # nodes on each side of a cut that are solved with it
_PRICES = 6  # of memory that are tried


def solve(problem: Problem, options: Options) -> Solution:
    """Raises InfeasibleError where it finds no plan that is allowed and fits (which proves nothing)."""
    started = time.perf_counter()
    small = condensed(problem)
    free = bisected(small, 0.0, options.clock)
    if math.isinf(objective(small, free)):
        raise InfeasibleError(
            "recursive bisection met choices that exclude each other; that no plan exists is not proven",
            "--solver auto",
            proven=False,
        )
    choice = _fitting(small, free, options.clock)
    if choice is None:
        raise infeasible(small, proven=False)
    return finish(problem, choice, message_bound(problem), "recursive", started)


def _fitting(problem: Problem, free: Choice, clock: Clock) -> Choice | None:
    """The fastest of the plans that fit, over a few prices of memory."""
    best = repaired(problem, free)
    if fits(memory(problem, free).max(initial=0.0), problem.capacity_bytes):
        return free
    low, high = 0.0, 1e3 * objective(problem, free) / max(memory(problem, free).max(), 1.0)
    price = 1e-3 * high
    for _ in range(_PRICES):
        if clock.over:
            break
        choice = bisected(problem, price, clock)
        within = fits(memory(problem, choice).max(initial=0.0), problem.capacity_bytes)
        mended = choice if within else repaired(problem, choice)
        if mended is not None and (best is None or objective(problem, mended) < objective(problem, best)):
            best = mended
        low, high = (low, price) if within else (price, high)
        price = math.sqrt(max(low, 1e-6 * high) * high)
    return best


def bisected(problem: Problem, price: float, clock: Clock) -> Choice:
    """A choice of every node; bytes of nodes cost `price` seconds each. Forbidden entries are left only by bad luck."""
    pricy = replace(problem, nodes=tuple(_priced(node, price) for node in problem.nodes)) if price else problem
    state = _State(pricy, line(problem), clock)
    state.halve(0, len(problem.nodes))
    rough = tuple(state.choice)
    state.mend()
    best = min((tuple(state.choice), rough), key=lambda choice: objective(pricy, choice))
    return descend(pricy, links(pricy), best, Aim(1.0, 0.0, math.inf))


def _priced(node: Node, price: float) -> Node:
    start, stop = node.interval
    return replace(node, seconds=node.seconds + price * node.bytes) if start < stop else node


@dataclass
class _State:
    """`choice[n]` is -1 until node n is decided; `order` is the line, `known` the windows solved."""

    problem: Problem
    order: list[int]
    clock: Clock
    known: dict[Hashable, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = np.empty(len(self.order), np.int64)
        self.place[self.order] = np.arange(len(self.order))
        self.choice = [-1] * len(self.order)
        self.content = Contents(self.problem)
        self.fences = Fences(self.problem)
        self.possible = list(self.fences.flags)
        self.windows: list[tuple[int, int]] = []
        self.of: list[list[int]] = [[] for _ in self.order]
        for v, value in enumerate(self.problem.values):
            for n in (value.producer, *value.consumers):
                self.of[n].append(v)
        starts, stops = np.zeros(len(self.order) + 1, np.int64), np.zeros(len(self.order) + 1, np.int64)
        for value in self.problem.values:
            places = self.place[[value.producer, *value.consumers]]
            starts[places.min() + 1] += 1
            stops[places.max() + 1] += 1
        self.width = np.cumsum(starts - stops)  # values that cross a cut before each place

    def halve(self, low: int, high: int) -> None:
        """Decides the nodes at the places low <= place < high."""
        if high - low <= 2 * _HALF:
            free = [n for n in self.order[low:high] if self.choice[n] < 0]
            self.decide(free, self.solved(free))
            return
        middle = self.cut(low, high)
        self.windows.append((max(low, middle - _HALF), min(high, middle + _HALF)))
        free = [n for n in self.order[slice(*self.windows[-1])] if self.choice[n] < 0]
        ends = self.crossing(free, middle)
        if ends:
            solved = dict(zip(free, self.solved(free), strict=True))
            self.decide(ends, [solved[n] for n in ends])
        self.halve(low, middle)
        self.halve(middle, high)

    def mend(self) -> None:
        """Solves the window around every cut again, now that all around it is decided."""
        self.fences.flags = self.possible
        for low, high in self.windows if all(s >= 0 for s in self.choice) else []:
            free = self.order[low:high]
            for n in free:
                self.choice[n] = -1
            solved = self.solved(free)
            for n, s in zip(free, solved, strict=True):
                self.choice[n] = s

    def cut(self, low: int, high: int) -> int:
        """The place near the middle that the fewest values cross; of those the nearest to it."""
        margin = (high - low) // 3
        places = np.arange(low + margin, high - margin + 1)
        return int(places[np.lexsort((np.abs(2 * places - low - high), self.width[places]))[0]])

    def crossing(self, free: Sequence[int], middle: int) -> list[int]:
        """The nodes among `free` that share a value with a node on the other side of the cut."""
        return [
            n
            for n in free
            if any(
                (self.place[m] < middle) != (self.place[n] < middle)
                for v in self.of[n]
                for m in (self.problem.values[v].producer, *self.problem.values[v].consumers)
            )
        ]

    def decide(self, nodes: Sequence[int], choices: Sequence[int]) -> None:
        for n, s in zip(nodes, choices, strict=True):
            if not self.fences.flags[n][s] and self.fences.flags[n].any():
                s = int(np.argmin(np.where(self.fences.flags[n], self.problem.nodes[n].seconds, np.inf)))
            self.choice[n] = s
            if self.fences.of[n]:
                self.fences.fix(n, s)

    def solved(self, free: Sequence[int]) -> Choice:
        """The best choices of the nodes `free` given the decided ones, blind to the others."""
        if not free:
            return ()
        nodes, values, key = self.window(free)
        allowed = [self.allowed(n) for n in nodes]
        full = (*key, *(some.tobytes() for some in allowed))
        if full not in self.known:
            window = Problem(tuple(self.problem.nodes[n] for n in nodes), values, horizon=self.problem.horizon)
            self.known[full] = self.minimum(free, window, allowed)
        return self.known[full]

    def minimum(self, free: Sequence[int], window: Problem, allowed: list[Integers]) -> Choice:
        """Exact where dp's tables are small; else, or where time is out, a descent from each node's cheapest."""
        if not self.clock.over:
            try:
                minimum = minimise(window, Contents(window), allowed=allowed, budget_entries=SMALL_ENTRIES)
                return minimum.choice[: len(free)]
            except InfeasibleError:
                pass
        cheapest = [int(some[np.argmin(n.seconds[some])]) for n, some in zip(window.nodes, allowed, strict=True)]
        masked = tuple(
            replace(n, seconds=np.where(np.isin(np.arange(len(n.seconds)), some), n.seconds, np.inf))
            for n, some in zip(window.nodes, allowed, strict=True)
        )
        part = replace(window, nodes=masked)
        return descend(part, links(part), cheapest, Aim(1.0, 0.0, math.inf))[: len(free)]

    def allowed(self, n: int) -> Integers:
        if self.choice[n] >= 0:
            return np.array([self.choice[n]])
        flags = self.fences.flags[n]
        return np.flatnonzero(flags) if flags.any() else np.array([int(np.argmin(self.problem.nodes[n].seconds))])

    def window(self, free: Sequence[int]) -> tuple[list[int], tuple[Value, ...], tuple[Hashable, ...]]:
        """The free nodes, then the decided ones next to them; the values among these; and what they are made of."""
        nodes, inside = list(free), set(free)
        index = {n: i for i, n in enumerate(free)}

        def local(n: int) -> int:
            if n not in index:
                index[n] = len(nodes)
                nodes.append(n)
            return index[n]

        values: list[Value] = []
        key: list[Hashable] = []
        for v in dict.fromkeys(v for n in free for v in self.of[n]):
            value = self.problem.values[v]
            known = [i for i, c in enumerate(value.consumers) if c in inside or self.choice[c] >= 0]
            if not known or (value.producer not in inside and self.choice[value.producer] < 0):
                continue
            producer, consumers = local(value.producer), tuple(local(value.consumers[i]) for i in known)
            targets = tuple(value.targets[i] for i in known)
            spans = ((0, 0),) * len(known)
            values.append(
                Value(
                    name=value.name,
                    producer=producer,
                    consumers=consumers,
                    source=value.source,
                    targets=targets,
                    seconds=value.seconds,
                    bytes=value.bytes,
                    intervals=spans,
                )
            )
            number = self.content.number
            arrays = (value.source, value.seconds, *targets)
            key.append((producer, consumers, *map(number, arrays)))
        key.extend(self.content.number(self.problem.nodes[n].seconds) for n in nodes)
        return nodes, tuple(values), tuple(key)
