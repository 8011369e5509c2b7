"""Plans of a large core by narrow moves: one that prices of memory follow, then others under the limit.

`follow`: a plan is bettered under prices, and the prices move towards where it overflows, as multipliers do; being
near the best of its prices, it tells them more than what messages round to. `fit`: what overflows costs more with
every round, until the plan fits; from then on only what fits is taken.
"""

from __future__ import annotations

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.contraction.node_choices import NodeChoices, cheapest, either
from autoshard.solvers.contraction.node_costs import NodeCosts
from autoshard.solvers.contraction.reduced_problem import Inner
from autoshard.solvers.pairwise.dual_ascent import Ascent
from autoshard.solvers.pairwise.narrow_moves import NarrowMoves
from autoshard.solvers.pairwise.neighbourhood_search import within
from autoshard.solvers.pairwise.tree_moves import TreeMove

_STEP, _SLOWER, _LEAST_STEP = 0.05, 10, 0.05  # of the cost, at first; rounds until it is halved; of the first step
_RECENT = 0.5  # the weight of the plans before, in the direction
_PUSH = 0.02  # of the cost: how much the price of an overflow rises with each round
_KEPT = 0.7  # of that price, where nothing overflows
_STRENGTHS = (0.0, 0.5, 0.8, 1.0, 1.0)  # times the prices, while the plan fits
_WIDTHS = (2, 4)  # choices of each node that messages think best


class NarrowSearch:
    """`choice`: the plan it works on, whatever its memory; `prices` (times,)."""

    def __init__(
        self, core: Inner, moves: NarrowMoves, choice: Integers, prices: Floats, rng: np.random.Generator
    ) -> None:
        self.core, self.moves, self.rng = core, moves, rng
        self.choice, self.prices = choice, prices
        self.push, self.pushes = np.zeros_like(prices), 0
        self.direction: Floats | None = None
        self.number = 0

    @property
    def fits(self) -> bool:
        return self.core.fits(self.choice)

    def better(self, ascent: Ascent | None) -> None:
        """A move under the prices, over few choices where an ascent tells which."""
        unary = self._priced(self.prices)
        if ascent is None:
            moves = attempt(self.moves.changes, unary, self.choice, self.rng)
        else:
            few = self._promising(ascent, int(self.rng.choice(_WIDTHS)))
            moves = attempt(self.moves.mixed, unary, self.choice, few, self.rng)
        for move in moves or ():
            self.choice = self._with(move.nodes, move.choices)

    def follow(self, ascent: Ascent | None) -> None:
        """A move, and a step of the prices."""
        self.better(ascent)
        items = self.core.items
        if not 0 < items.capacity < np.inf:
            return
        over = np.maximum(items.alive(self.choice), items.base) / items.capacity - 1.0
        self.direction = over if self.direction is None else _RECENT * self.direction + (1 - _RECENT) * over
        move = np.where((self.direction < 0) & (self.prices <= 0), 0.0, self.direction)
        length = float(np.abs(move).sum())
        if length > 0:
            part = max(_LEAST_STEP, 1.0 / (1.0 + self.number / _SLOWER))
            step = _STEP * self._typical() * part / items.capacity
            self.prices = np.maximum(0.0, self.prices + step * move / length)
        self.number += 1

    def fit(self) -> None:
        """A move that makes the plan fit, or leaves it so."""
        items = self.core.items
        alive = items.alive(self.choice)
        over = np.maximum(alive - items.capacity, 0.0)
        if not over.any():
            self.push *= _KEPT
            strength = float(self.rng.choice(_STRENGTHS))
            unary = self._priced(strength * (self.prices + self.push))
            self._take(alive, attempt(self.moves.changes, unary, self.choice, self.rng))
            return
        self.pushes += 1
        scale = items.capacity or over.max()  # nothing fits into nothing, whatever the push
        self.push = self.push + _PUSH * self.pushes * (self._typical() / scale) * (over / over.sum())
        unary = self._priced(self.prices + self.push)
        for move in attempt(self.moves.changes, unary, self.choice, self.rng) or ():
            self.choice = self._with(move.nodes, move.choices)

    def mix(self, ascent: Ascent, others: list[Integers]) -> None:
        """A move over what messages think best of each node, or what another plan chooses; the plan fits."""
        width = int(self.rng.choice([0, *_WIDTHS])) if others else int(self.rng.choice(_WIDTHS))
        if width:
            kept = self._promising(ascent, width)
        else:
            other = others[int(self.rng.integers(len(others)))]
            kept = either(self.choice, other)
        unary = self._priced(float(self.rng.choice(_STRENGTHS)) * self.prices)
        alive = self.core.items.alive(self.choice)
        self._take(alive, attempt(self.moves.mixed, unary, self.choice, kept, self.rng))

    def _promising(self, ascent: Ascent, width: int) -> NodeChoices:
        """The choices of each node that messages think best, and its own."""
        return cheapest(ascent.beliefs(), width, self.choice)

    def _take(self, alive: Floats, moves: list[TreeMove] | None) -> None:
        self.choice, _ = within(self.core, self.choice, alive, moves or [])

    def _priced(self, prices: Floats) -> NodeCosts:
        return self.core.priced(prices)

    def _typical(self) -> float:
        cost = abs(self.core.cost(self.choice))
        return cost if 0 < cost < np.inf else 1.0

    def _with(self, nodes: list[int], choices: list[int]) -> Integers:
        choice = self.choice.copy()
        choice[nodes] = choices
        return choice
