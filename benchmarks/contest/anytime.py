"""Large pairwise problems within a time limit: contract, bound, search, prove; the best so far when the clock is over.

1. Contraction (`presolve.contracted`) leaves a core. Messages under multipliers (`messages.Ascent`) bound it, and
   the plan of the last ones is polished (`narrow_search.polished`).
2. Where the core's tight program is small: relaxation, choices pruned by reduced cost, branch and bound.
3. Else, in turn: messages; a plan that prices follow (`narrow_search.NarrowSearch`); what the plans on its way differ
   in, as an integer program; narrow moves, and sections of the nodes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from autoshard.ir.problem import Floats, Integers, Problem
from autoshard.solvers import audited
from autoshard.solvers.common.clock import attempt, watched
from autoshard.solvers.common.infeasibility import none_fits
from autoshard.solvers.common.result import Solution, finish, tightened
from autoshard.solvers.common.solver_options import Clock, PartialClock
from autoshard.system.process_memory import infrequent_gc
from autoshard.units import ROUNDING
from benchmarks.contest.asplos_format import refuse_if_short
from benchmarks.contest.core_problem import Core, cheapest, core, section
from benchmarks.contest.messages import Ascent, Round
from benchmarks.contest.narrow_moves import NarrowMoves
from benchmarks.contest.narrow_search import SWEEPS, NarrowSearch, polished
from benchmarks.contest.section_ilp import SectionProgram, entries, undercut

_PROGRAM = 200_000  # edge variables of a program that is solved whole
_ROUNDS = 400  # of messages, at most
_FIRST = 20  # rounds before the first plan is polished; then of twice as many each time
_POLISH = 12  # moves for one plan
_POLISHING = 0.15  # of the time of rounds, for the plan of the last ones
_LAST = 10  # rounds: of their plans the one to start from
_PATIENCE = 1.5  # times the time of rounds, until a plan comes out of one that is not poor
_POOL = 5  # plans that are combined with a new one
_CLIMB = 0.25  # the same for messages, where they do most of the work
_FOLLOW = 0.6  # the same for a plan that prices follow
_FOLLOWED, _FOLLOWS = 50, 2  # moves of one, at most; such plans, where no clock ends them
_AGAIN = 40  # rounds of messages between two
_FIT = 30  # moves until the plan is to fit
_IDLE, _LITTLE = 3, 5e-4  # steps in a row that gain less than this part, before messages go on
_SETTLED, _SAME = 4, 1e-3  # moves in a row that change the cost by less than this part, before the plan is to fit
_FEW = 0.5  # of the moves of a plan that prices follow, those over few choices
_TRAIL = 12  # plans on the way that are combined
_MIX = 0.3  # of the narrow moves, those over few choices
_MOVES, _NODES, _MOST_MOVES = 3, 20_000, 60  # narrow ones in a row: as many as go over so many nodes, within these
_USUAL = 0.8  # of the steps go the way that gained more in its time
_FORGET = 0.7  # of what a way gained before
_WIDTHS = (2, 3, 4, 6, 10, 1000)  # choices of each node in a section
_SHARE = 0.6  # of the time that is left, for a step before others
_THIN, _THIN_ENTRIES = 4, 60_000  # choices of each node in a thin program, and its most edge variables
_THIN_CLIMB = 100  # rounds of messages before
_THIN_ROUNDS = 4  # of relaxing it and letting the messages settle
_SETTLE = 20  # sweeps
_NEAR = 0.02  # relative: a choice that lifts the bound by less stays in the next thin program; a plan is polished
_SECTION = 20_000  # edge variables of one section
_SECTION_SECONDS = 3.0


def search(problem: Problem, clock: Clock, *, seed: int = 0) -> Solution:
    """The best plan found within the capacity, with a lower bound, both checked against the problem's own arrays.

    Raises InfeasibleError where no choice is allowed or none fits (the message says whether that is proven).
    """
    started = time.perf_counter()
    refuse_if_short(problem)
    run = _PairwiseSearch(core(problem), clock, seed)
    with watched(clock), infrequent_gc():
        attempt(run.run)
    if run.best is None:
        raise none_fits(problem, run.exhausted)
    choice = run.core.lifted(run.best)
    solution = finish(problem, choice, run.value if run.exhausted else run.bound, "contest", started, cut=clock.cut)
    return audited(problem, choice, solution, clock.cut)


class _PairwiseSearch:
    """The state of one solve. `bound` only rises, `best` only gets better."""

    def __init__(self, core: Core, clock: Clock, seed: int) -> None:
        self.core, self.clock = core, clock
        self.rng = np.random.default_rng(seed)
        self.moves = NarrowMoves(core.graph)
        self.ascent = Ascent(core)
        self.bound, self.value = -math.inf, math.inf
        self.best: Integers | None = None
        self.exhausted = False
        self.pool: list[Integers] = []
        self.rounded = self.smallest()  # the best start of those that messages round to
        self.followed = self.stuck = False
        self.narrow = NarrowSearch(core, self.moves, self.rounded, self.ascent.multipliers, self.rng)

    @property
    def closed(self) -> bool:
        near = math.isfinite(self.value) and self.value - self.bound <= ROUNDING * abs(self.value)
        return self.exhausted or near

    @property
    def poor(self) -> bool:
        """Is the best plan still far from what the bound allows?"""
        return not self.value - self.bound <= abs(self.bound)

    def offer(self, choice: Integers | None) -> None:
        if choice is None or not self.core.fits(choice):
            return
        value = self.core.cost(choice)
        if value < self.value:
            self.best, self.value = choice, value

    def raise_bound(self, bound: float) -> None:
        self.bound = tightened(self.bound, bound, self.value)

    def run(self) -> None:
        if not self.core.graph.unary:
            self.offer(np.zeros(0, np.int64))
            self.exhausted = True
            return
        self.offer(self.rounded)
        if entries(self.core.graph) <= _PROGRAM:
            self.climb(_FIRST, math.inf)
            self.close([np.arange(len(costs)) for costs in self.core.graph.unary])
            return
        if entries(self.core.graph, list(cheapest(self.ascent.beliefs(), _THIN))) <= _THIN_ENTRIES:
            self.climb(_THIN_CLIMB, _SHARE * self.clock.left)
            self.thin()
            self.combine(self.pool[::-1])
        else:
            self.climb(_ROUNDS, _CLIMB * self.clock.left)
        self.turns()
        self.combine(self.pool[::-1])
        while not (self.clock.over or self.closed or self.best is None):
            self.move()
            if not math.isfinite(self.clock.limit_seconds):
                return

    def smallest(self) -> Integers:
        """Every node's choice that uses least over time, the cheaper of equals: a plan at once."""
        none = np.zeros_like(self.core.edges.unary)
        sizes = self.core.items.priced(none, np.ones(len(self.core.items.base)))
        pairs = zip(self.core.graph.unary, sizes, strict=True)
        return np.array([np.lexsort((costs, size))[0] for costs, size in pairs], np.int64)

    def climb(self, most: int, seconds: float) -> None:
        """Rounds of messages, and the plan of the last ones polished; before, where it may be the best there is or
        time is no matter, and after, where none comes out."""
        part, soon = PartialClock(seconds, whole=self.clock), _FIRST
        recent: deque[Integers] = deque(maxlen=_LAST)
        for number in range(1, most + 1):
            round_ = self.ascent.step()
            self.raise_bound(round_.bound)
            recent.append(round_.choice)
            last = number == most or part.left < _POLISHING * part.limit_seconds
            if last or (number >= soon and (math.isinf(seconds) or self.near(round_))):
                self.rounded = min(reversed(recent), key=self.promise)
                self.polish(self.rounded, round_.multipliers, self.clock if last else part)
                soon *= 2
                recent.clear()
            tried = last and not (self.poor and part.seconds < _PATIENCE * part.limit_seconds)
            if tried or self.clock.over or self.closed:
                break

    def near(self, round_: Round) -> bool:
        """Does a round's plan cost about as little as any can?"""
        return self.core.cost(round_.choice) <= (1 + _NEAR) * round_.bound

    def promise(self, choice: Integers) -> tuple[float, float]:
        """By how much it overflows, and its cost; of two plans that the smaller of these makes the better start."""
        items, cost = self.core.items, self.core.cost(choice)
        over = max(0.0, float(items.alive(choice).max(initial=0.0)) - items.capacity)
        return over if math.isfinite(cost) else math.inf, cost

    def polish(self, choice: Integers, multipliers: Floats, clock: Clock) -> None:
        plan = polished(self.core, self.moves, choice, multipliers, _POLISH, self.rng, clock)
        if plan is not None:
            self.offer(plan)
            self.pool = [*self.pool[-_POOL:], plan]

    def combine(self, plans: Sequence[Integers]) -> None:
        """The best mixture of plans, first come those that matter most, with the best one: a program over what they
        differ in; plans that make it too large are left out."""
        if self.best is None or self.clock.over:
            return
        taken, choices = [self.best], dict[int, Integers]()
        for plan in plans:
            more = self._differing([*taken, plan])
            if self._entries(more) <= _SECTION:
                taken, choices = [*taken, plan], more
        if choices:
            self.improve(choices)

    def _differing(self, plans: Sequence[Integers]) -> dict[int, Integers]:
        """Of each node where the plans are not all alike, what they choose."""
        every = np.stack(plans)
        nodes = np.flatnonzero((every != every[0]).any(axis=0))
        return {int(n): np.unique(every[:, n]) for n in nodes}

    def _entries(self, choices: dict[int, Integers]) -> int:
        """Edge variables of a program over `choices`."""
        around = self.moves.around
        return sum(len(choices[n]) * len(choices[o]) for n in choices for o, _ in around[n] if o in choices) // 2

    def improve(self, choices: dict[int, Integers]) -> None:
        """The best plan anew in some nodes, over some of their choices, the others fixed."""
        assert self.best is not None
        part = section(self.core, self.moves.around, choices, self.best)
        clock = PartialClock(_SECTION_SECONDS, whole=self.clock)
        start = part.inside(self.best)
        everything = [np.arange(len(some)) for some in part.kept]
        outcome = SectionProgram(part.inner, everything, clock, part.inner.cost(start)).search(start)
        if outcome.choice is not None:
            self.offer(part.outside(self.best, outcome.choice))

    def close(self, choices: Sequence[Integers]) -> None:
        """The whole program: relaxation, pruning, and branch and bound."""
        while not (self.closed or self.clock.over):
            program = SectionProgram(self.core, choices, self.clock, self.value - self.core.graph.constant)
            relaxed = program.relax()
            if relaxed is None:
                self.exhausted = program.highs.infeasible
                return
            self.raise_bound(min(relaxed.bound + self.core.graph.constant, self.value))  # of what may be better
            if self.clock.over or self.closed:
                return
            self.polish(program.choice(relaxed.x), program.multipliers(), self.clock)
            fewer = undercut(program.model, relaxed, self.value - self.core.graph.constant)
            if any(not len(some) for some in fewer):
                self.exhausted = True
                return
            if sum(map(len, fewer)) > 0.7 * sum(map(len, choices)):
                self.branch(program)
                return
            choices = fewer

    def thin(self) -> None:
        """The program over the few choices of every node that the messages think best, and what its prices add."""
        choices = self.promising(_THIN)
        for _ in range(_THIN_ROUNDS):
            program = SectionProgram(self.core, choices, self.clock, self.value - self.core.graph.constant)
            relaxed = program.relax()
            if relaxed is None or self.clock.over:
                return
            self.polish(program.choice(relaxed.x), program.multipliers(), self.clock)
            self.ascent.to(program.multipliers())
            for _ in range(_SETTLE):
                round_ = self.ascent.step(move=False)
            self.raise_bound(round_.bound)
            self.polish(round_.choice, round_.multipliers, self.clock)
            useful = undercut(program.model, relaxed, relaxed.bound + _NEAR * abs(relaxed.bound))
            choices = [np.union1d(a, b) for a, b in zip(self.promising(_THIN), useful, strict=True)]
        part = PartialClock(_SHARE * self.clock.left, whole=self.clock)
        program = SectionProgram(self.core, choices, part, self.value - self.core.graph.constant)
        self.offer(program.search(self.best).choice)

    def promising(self, width: int) -> list[Integers]:
        """Of every node the best few choices by the messages, and that of the best plan."""
        return list(cheapest(self.ascent.beliefs(), width, self.best))

    def branch(self, program: SectionProgram) -> None:
        best = self.best
        inside = best is not None and all(s in some for s, some in zip(best.tolist(), program.kept, strict=True))
        outcome = program.search(best if inside else None)
        self.offer(outcome.choice)
        self.raise_bound(min(outcome.bound + self.core.graph.constant, self.value))
        self.exhausted = outcome.done

    def turns(self) -> None:
        """A plan that prices follow, larger moves, and messages again, in turn."""
        for _ in range(10**9 if math.isfinite(self.clock.limit_seconds) else _FOLLOWS):
            if self.clock.over or self.closed:
                return
            value = self.value
            self.follow(PartialClock(_FOLLOW * self.clock.left, whole=self.clock))
            self.move()
            if not self.gains(value):
                self.ascent.to(self.ascent.multipliers)
                self.climb(_AGAIN, _CLIMB * self.clock.left)

    def follow(self, part: Clock) -> None:
        """Prices that follow the best plan, or what messages round to, as it changes; then it is made to fit, and the
        plans on the way are combined. After one that gained little the next begins elsewhere."""
        start, prices, value = self.best, self.ascent.multipliers, self.value
        if start is None or self.poor or self.stuck:
            start = self.rounded
        elif self.followed:
            prices = self.narrow.prices + self.narrow.push
        self.followed = True
        self.narrow = NarrowSearch(self.core, self.moves, start, prices, self.rng)
        trail: deque[Integers] = deque(maxlen=_TRAIL)
        self.settle(part, trail)
        for _ in range(_FIT):
            if self.clock.over or self.narrow.fits:
                break
            self.narrow.fit(self.ascent if self.rng.random() < _FEW else None)
            trail.appendleft(self.narrow.choice)
        self.offer(self.narrow.choice)
        if self.narrow.fits:
            self.pool = [*self.pool[-_POOL:], self.narrow.choice]
        self.combine([*trail, *self.pool[::-1]])
        self.stuck = not (self.stuck or self.gains(value))

    def gains(self, value: float) -> bool:
        """Is the best plan better than `value`, by more than a little?"""
        return self.value < value and (math.isinf(value) or value - self.value > _LITTLE * abs(value))

    def settle(self, part: Clock, trail: deque[Integers]) -> None:
        """Moves, and prices that follow, until the cost stays about the same."""
        idle, last = 0, math.inf
        for _ in range(_FOLLOWED):
            if part.over or self.closed or idle > _SETTLED:
                break
            few = self.rng.random() < _FEW
            if few:
                self.ascent.to(self.narrow.prices)
                for _ in range(SWEEPS):
                    self.raise_bound(self.ascent.step(move=False).bound)
            self.narrow.follow(self.ascent if few else None)
            self.offer(self.narrow.choice)
            trail.appendleft(self.narrow.choice)
            cost = self.core.cost(self.narrow.choice)
            idle, last = (idle + 1, last) if abs(cost - last) <= _SAME * abs(cost) else (0, cost)

    def move(self) -> None:
        """Narrow moves and sections, mostly that which gained more in its time; until both were tried, and a few gain
        nothing."""
        gained = {self.narrowly: math.inf, self.section_anew: math.inf}
        idle = 0
        while (idle < _IDLE or math.inf in gained.values()) and not (
            self.clock.over or self.closed or self.best is None
        ):
            usual = max(gained, key=lambda tactic: gained[tactic])
            tactic = usual if self.rng.random() < _USUAL else next(w for w in gained if w is not usual)
            left, value = self.clock.left, self.value
            tactic()
            idle = 0 if self.gains(value) else idle + 1
            gain = (value - self.value) / max(left - self.clock.left, 1e-3)
            known = gained[tactic]
            gained[tactic] = gain if math.isinf(known) else _FORGET * known + (1 - _FORGET) * gain

    def narrowly(self) -> None:
        """Some narrow moves from the best plan, within the limit."""
        assert self.best is not None
        self.narrow.choice = self.best
        for _ in range(min(_MOST_MOVES, max(_MOVES, _NODES // len(self.best)))):
            if self.clock.over:
                return
            if self.rng.random() < _MIX:
                self.narrow.mix(self.ascent, self.pool)
            else:
                self.narrow.fit()
            self.offer(self.narrow.choice)

    def section_anew(self) -> None:
        """The best plan anew in a section of the nodes."""
        assert self.best is not None
        choices = self.region(self.best, int(self.rng.choice(_WIDTHS)))
        if choices:
            self.improve(choices)

    def region(self, best: Integers, width: int) -> dict[int, Integers]:
        """Nodes around a random one, and the choices of each: the best plan's, and `width` that the messages think
        best."""
        start, costs = int(self.rng.integers(len(best))), self.ascent.beliefs()
        order, seen, choices, size = [start], {start}, dict[int, Integers](), 0
        for n in order:
            some = np.union1d(np.argsort(costs[n], kind="stable")[:width], best[n : n + 1])
            if len(some) > 1:
                choices[n] = some
                size += sum(len(some) * len(choices[o]) for o, _ in self.moves.around[n] if o in choices and o != n)
            if size > _SECTION:
                break
            others = [o for o, _ in self.moves.around[n] if o not in seen]
            seen.update(others)
            order.extend(self.rng.permutation(others).tolist() if others else [])
        return choices
