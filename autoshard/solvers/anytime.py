"""Large pairwise problems within a time limit: contract, bound, search, prove; the best so far when the clock is over.

1. Contraction (contract.py) leaves a core. Where its tight program is small: relaxation, a rounded and polished plan,
   choices pruned by reduced cost, branch and bound.
2. Else messages under multipliers (ascent.py) bound it, and every few rounds their plan is polished. Then the program
   over the choices of the best plans met, and over those of a part of the nodes at a time, improves the plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.problem import Floats, Integers, Problem, Solution
from autoshard.solvers import ascent
from autoshard.solvers.closing import Program, entries, undercut
from autoshard.solvers.core import Core, core
from autoshard.solvers.forest import Forests
from autoshard.solvers.options import Clock
from autoshard.solvers.pairwise import pairwise
from autoshard.solvers.polish import polished
from autoshard.solvers.result import TOLERANCE, finish

_PROGRAM = 200_000  # edge variables of a program that is solved whole
_ROUNDS = 150  # of messages, where no clock ends them
_FIRST = 20  # rounds before the first plan is polished
_EVERY = 10  # rounds between polished plans
_POLISH = 30  # forests for one plan
_SHARE = 0.6  # of the time that is left, for messages


@dataclass
class Part(Clock):
    """A clock within another one: over when either is."""

    whole: Clock = field(default_factory=Clock)

    @property
    def left(self) -> float:
        own = 0.0 if self.stopped else max(0.0, self.limit_seconds - self.seconds)
        return min(own, self.whole.left)


def solve(problem: Problem, clock: Clock, *, seed: int = 0) -> Solution:
    """The best plan found within the capacity, with a lower bound.

    Raises InfeasibleError where no choice is allowed or none fits (the message says whether that is proven).
    """
    started = time.perf_counter()
    pairs = pairwise(problem)
    search = _Search(core(pairs, len(problem.nodes)), clock, seed)
    search.run()
    if search.best is None:
        raise InfeasibleError("no plan found that fits" + ("" if search.exhausted else ", which is not proven"))
    bound = search.value if search.exhausted else search.bound
    return finish(problem, search.core.lifted(search.best), bound, "dp", started)


class _Search:
    """The state of one solve. `bound` only rises, `best` only gets better; `pool`: plans worth combining."""

    def __init__(self, core: Core, clock: Clock, seed: int) -> None:
        self.core, self.clock = core, clock
        self.rng = np.random.default_rng(seed)
        self.forests = Forests(core.graph)
        self.bound, self.value = -math.inf, math.inf
        self.best: Integers | None = None
        self.exhausted = False
        self.pool: list[Integers] = []
        self.multipliers = np.zeros(len(core.items.base))

    @property
    def closed(self) -> bool:
        near = math.isfinite(self.value) and self.value - self.bound <= TOLERANCE * abs(self.value)
        return self.exhausted or near

    def offer(self, choice: Integers | None) -> None:
        if choice is None or not self.core.fits(choice):
            return
        value = self.core.cost(choice)
        if math.isfinite(value):
            self.pool.append(choice)
        if value < self.value:
            self.best, self.value = choice, value

    def raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, min(bound, self.value))

    def run(self) -> None:
        if not self.core.graph.unary:
            self.offer(np.zeros(0, np.int64))
            self.exhausted = True
            return
        if entries(self.core.graph) <= _PROGRAM:
            self.climb(4 * _EVERY, math.inf)
            self.close(_everything(self.core))
            return
        self.climb(_ROUNDS, _SHARE * self.clock.left)

    def climb(self, most: int, seconds: float) -> None:
        """Rounds of messages, with a plan polished every few of them."""
        part = Part(seconds, whole=self.clock)
        for number, found in enumerate(ascent.rounds(self.core)):
            if found.bound > self.bound:
                self.multipliers = found.multipliers
            self.raise_bound(found.bound)
            if number >= _FIRST and number % _EVERY == 0:
                self.offer(self.polish(found.choice, found.multipliers, part))
            if part.over or self.closed or number >= most:
                break

    def polish(self, choice: Integers, multipliers: Floats, clock: Clock) -> Integers | None:
        return polished(self.core, self.forests, choice, multipliers, _POLISH, self.rng, clock)

    def close(self, kept: Sequence[Integers]) -> None:
        """The whole program: relaxation, pruning, and branch and bound."""
        while not (self.closed or self.clock.over):
            program = self.program(kept)
            relaxed = program.relax()
            if relaxed is None:
                self.exhausted = not self.clock.over
                return
            self.raise_bound(relaxed.bound + self.core.graph.constant)
            if self.clock.over or self.closed:
                return
            self.offer(self.polish(program.choice(relaxed.x), self.multipliers, self.clock))
            fewer = undercut(program.model, relaxed, self.value - self.core.graph.constant)
            if any(not len(some) for some in fewer):
                self.exhausted = True
                return
            if sum(map(len, fewer)) > 0.7 * sum(map(len, kept)):
                self.branch(program)
                return
            kept = fewer

    def program(self, kept: Sequence[Integers]) -> Program:
        return Program(self.core, kept, self.clock, self.value - self.core.graph.constant)

    def branch(self, program: Program) -> None:
        inside = self.best is not None and all(
            s in some for s, some in zip(self.best.tolist(), program.kept, strict=True)
        )
        found = program.search(self.best if inside else None)
        self.offer(found.choice)
        self.raise_bound(found.bound + self.core.graph.constant)
        self.exhausted = found.done


def _everything(core: Core) -> list[Integers]:
    return [np.arange(len(own)) for own in core.graph.unary]
