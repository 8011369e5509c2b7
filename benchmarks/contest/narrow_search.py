"""Plans of a large core by narrow moves: one that prices of memory follow, then others under the limit.

`follow`: a plan is bettered under prices, and the prices move towards where it overflows, as multipliers do; being
near the best of its prices, it tells them more than what messages round to. `fit`: what overflows costs more with
every round, until the plan fits; from then on only what fits is taken. `polished`: from any plan to a
good one that fits.
"""

from __future__ import annotations

import bisect

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.solver_options import Clock
from benchmarks.contest.core_problem import Inner, NodeCosts, cheapest, either
from benchmarks.contest.messages import Ascent, PriceSteps
from benchmarks.contest.narrow_moves import Move, NarrowMoves

_STEP, _LEAST_STEP = 0.05, 0.05  # of the cost, at first; of the first step
_PUSH = 0.02  # of the cost: how much the price of an overflow rises at first
_ENOUGH = 0.8  # of an overflow: where more than that is left after a round, the next push is larger, else smaller
_KEPT = 0.7  # of that price, where nothing overflows
_STRENGTHS = (0.0, 0.5, 0.8, 1.0, 1.0)  # times the prices, while the plan fits
_POLISH_PUSH = 0.01  # of the typical cost: how much more expensive overflowing times get with each round of polishing
_MOST_CHANGES = 64  # made at once in polishing, or of many a quarter
SWEEPS = 2  # of messages at new prices, before they tell what is best
_WIDTHS = (2, 4)  # choices of each node that messages think best
_DOUBTED = (5, 20, 60, 200)  # nodes whose choice they think least of


class NarrowSearch:
    """`choice`: the plan it works on, whatever its memory; `prices` (times,)."""

    def __init__(
        self, core: Inner, moves: NarrowMoves, choice: Integers, prices: Floats, rng: np.random.Generator
    ) -> None:
        self.core, self.moves, self.rng = core, moves, rng
        self.choice, self.prices = choice, prices
        self.push, self.pushes = np.zeros_like(prices), 0.0
        self.worst = 0.0
        self.steps = PriceSteps(_STEP, _LEAST_STEP)

    @property
    def fits(self) -> bool:
        return self.core.fits(self.choice)

    def better(self, ascent: Ascent | None) -> None:
        """A move under the prices, over few choices where an ascent tells which."""
        self.choice = _after(self.choice, self._moves(ascent))

    def _moves(self, ascent: Ascent | None) -> list[Move]:
        """The best first."""
        unary = self.core.priced(self.prices + self.push)
        if ascent is None:
            return attempt(self.moves.changes, unary, self.choice, self.rng) or []
        return self._among_promising(ascent, unary, int(self.rng.choice(_WIDTHS))) or []

    def _just_fitting(self, moves: list[Move]) -> Integers:
        """After as few of the moves, the best first, as make the plan fit, or all of them: equal layers would all
        change at the same price."""
        everything = _after(self.choice, moves)
        if not self.core.fits(everything):
            return everything
        least = bisect.bisect_left(
            range(len(moves)), True, key=lambda count: self.core.fits(_after(self.choice, moves[:count]))
        )
        return _after(self.choice, moves[:least])

    def follow(self, ascent: Ascent | None) -> None:
        """A move, and a step of the prices."""
        self.better(ascent)
        items = self.core.items
        if not 0 < items.capacity < np.inf:
            return
        over = np.maximum(items.alive(self.choice), items.base) / items.capacity - 1.0
        self.prices = self.steps.after(self.prices, over, self._typical() / items.capacity)

    def fit(self, ascent: Ascent | None = None) -> None:
        """A move that makes the plan fit, or leaves it so."""
        items = self.core.items
        alive = items.alive(self.choice)
        over = np.maximum(alive - items.capacity, 0.0)
        if not over.any():
            self.push *= _KEPT
            strength = float(self.rng.choice(_STRENGTHS))
            unary = self.core.priced(strength * (self.prices + self.push))
            self._take(alive, attempt(self.moves.changes, unary, self.choice, self.rng))
            return
        most = float(over.max())
        self.pushes = self.pushes + 1 if most > _ENOUGH * self.worst else self.pushes / 2
        self.worst = most
        scale = items.capacity or over.max()  # nothing fits into nothing, whatever the push
        self.push = self.push + _PUSH * self.pushes * (self._typical() / scale) * (over / over.sum())
        if ascent is not None:
            ascent.to(self.prices + self.push)
            for _ in range(SWEEPS):
                ascent.step(move=False)
        self.choice = self._just_fitting(self._moves(ascent))

    def mix(self, ascent: Ascent, others: list[Integers]) -> None:
        """A move over what messages think best of each node, or what another plan chooses; the plan fits."""
        width = int(self.rng.choice([0, *_WIDTHS])) if others else int(self.rng.choice(_WIDTHS))
        unary = self.core.priced(float(self.rng.choice(_STRENGTHS)) * self.prices)
        alive = self.core.items.alive(self.choice)
        if width:
            self._take(alive, self._among_promising(ascent, unary, width))
        else:
            other = others[int(self.rng.integers(len(others)))]
            self._take(alive, attempt(self.moves.mixed, unary, self.choice, either(self.choice, other), self.rng))

    def _among_promising(self, ascent: Ascent, unary: NodeCosts, width: int) -> list[Move] | None:
        """A move over the choices of each node that messages think best, and its own. The nodes whose own they think
        least of are free: such a node often waits for others to change with it."""
        beliefs = ascent.beliefs()
        worse = beliefs.row[np.append(0, beliefs.ends)[:-1] + self.choice]
        freed = np.argsort(-worse, kind="stable")[: int(self.rng.choice(_DOUBTED))].tolist()
        few = cheapest(beliefs, width, self.choice)
        return attempt(self.moves.mixed, unary, self.choice, few, self.rng, freed)

    def _take(self, alive: Floats, moves: list[Move] | None) -> None:
        self.choice, _ = within(self.core, self.choice, alive, moves or [])

    def _typical(self) -> float:
        cost = abs(self.core.cost(self.choice))
        return cost if 0 < cost < np.inf else 1.0


def polished(
    core: Inner,
    moves: NarrowMoves,
    choice: Integers,
    multipliers: Floats,
    rounds: int,
    rng: np.random.Generator,
    clock: Clock,
) -> Integers | None:
    """The best plan met that fits the capacity; None where there is none."""
    cost = abs(core.cost(choice))  # infinite where the choices to begin with exclude each other
    typical = cost if 0 < cost < np.inf else 1.0
    alive = core.items.alive(choice)
    push, pushes = np.zeros(len(alive)), 0
    best, value = None, np.inf
    for _ in range(rounds):
        if clock.over:
            break
        over = np.maximum(alive - core.items.capacity, 0.0)
        if over.any():
            pushes += 1
            scale = core.items.capacity or over.max()  # nothing fits into nothing, whatever the push
            push += _POLISH_PUSH * pushes * (typical / scale) * (over / over.sum())
            priced = core.priced(multipliers + push)
            changes = attempt(moves.changes, priced, choice, rng)
            for change in changes or ():
                choice = _after(choice, [change])
            alive = core.items.alive(choice)
        else:
            push *= _KEPT
            unary = core.priced(float(rng.choice(_STRENGTHS)) * multipliers)
            changes = attempt(moves.changes, unary, choice, rng) or []
            choice, alive = within(core, choice, alive, changes[: max(_MOST_CHANGES, len(changes) // 4)])
        if alive.max(initial=0.0) <= core.items.capacity and (reached := core.cost(choice)) < value:
            best, value = choice, reached
    return best


def within(core: Inner, choice: Integers, alive: Floats, changes: list[Move]) -> tuple[Integers, Floats]:
    """Makes as many of the changes, best first, as the capacity allows; `choice` fits."""
    if not changes:
        return choice, alive
    new = _after(choice, changes)
    needed = core.items.alive(new)
    if needed.max(initial=0.0) <= core.items.capacity:
        return new, needed
    if len(changes) == 1:
        return choice, alive
    half = len(changes) // 2
    choice, alive = within(core, choice, alive, changes[:half])
    return within(core, choice, alive, changes[half:])


def _after(choice: Integers, changes: list[Move]) -> Integers:
    new = choice.copy()
    for change in changes:
        new[change.nodes] = change.choices
    return new
