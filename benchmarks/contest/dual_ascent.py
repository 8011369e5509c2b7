"""The lower bound of a large core under its memory limit: messages, and multipliers that follow their plans.

Every sweep of messages rounds to a plan. Where the recent plans overflow, memory gets more expensive, where they leave
room, cheaper; a step moves a given part of the total cost between times, so that no scale has to be guessed.

    L(p) = the messages' bound of ( c(x) + sum_t p_t m_t(x) ) - sum_t p_t C
    p <- max(0, p + step x d),  d <- d / 2 + (m(x) / C - 1) / 2 at the rounded plan x

Implemented in `dual_ascent.Ascent.step` and `dual_ascent.Ascent._move`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoshard.ir.problem import Floats, Integers
from benchmarks.contest.node_costs import NodeCosts
from benchmarks.contest.reduced_problem import Inner
from benchmarks.contest.trws_pairs import Messages

_STEP = 0.2  # of the typical cost, at first
_SLOWER = 10  # rounds until the step is halved
_LEAST_STEP = 0.01  # of the first step
_RECENT = 0.5  # the weight of the plans before, in the direction


class Round(NamedTuple):
    """`bound` of this round at `multipliers` (times,); `choice`: the plan it rounds to, whatever its memory."""

    bound: float
    multipliers: Floats
    choice: Integers


class Ascent:
    """`bound`: the best so far, at `multipliers`. Every bound is valid."""

    def __init__(self, core: Inner) -> None:
        self.core, self.messages = core, Messages(core.graph)
        self.limited = bool(np.isfinite(core.items.capacity) and core.items.capacity > 0)
        self.now = self.multipliers = np.zeros(len(core.items.base))
        self.unary = core.priced(self.multipliers)
        self.direction: Floats | None = None
        self.typical = np.inf
        self.number = 0
        self.bound = -np.inf

    def step(self, *, move: bool = True) -> Round:
        """One sweep each way; then the multipliers move, unless told not to."""
        items, multipliers = self.core.items, self.now
        self.messages.on(self.unary)
        free = items.capacity - items.base if self.limited else 0.0 * items.base
        bound = self.messages.back(self.unary) + self.core.graph.constant - float(multipliers @ free)
        choice = self.messages.rounded(self.unary)
        if bound > self.bound:
            self.bound, self.multipliers = bound, multipliers
        if self.limited and move:
            self._move(choice, bound)
        return Round(bound, multipliers, choice)

    def to(self, multipliers: Floats) -> None:
        """Goes on from other multipliers."""
        self.now, self.direction = multipliers, None
        self.unary = self.core.priced(multipliers)

    def beliefs(self) -> NodeCosts:
        """What each choice costs beyond the best of its node, as far as the messages tell."""
        return self.messages.beliefs(self.unary).above_least()

    def _move(self, choice: Integers, bound: float) -> None:
        items, cost = self.core.items, self.core.cost(choice)
        over = items.alive(choice) / items.capacity - 1.0
        before = over if self.direction is None else self.direction
        self.direction = _RECENT * before + (1 - _RECENT) * over
        move = np.where((self.direction < 0) & (self.now <= 0), 0.0, self.direction)
        length = float(np.abs(move).sum())
        self.typical = min(self.typical, cost if np.isfinite(cost) else abs(bound))
        if length > 0:
            part = max(_LEAST_STEP, 1.0 / (1.0 + self.number / _SLOWER))
            self.now = np.maximum(0.0, self.now + _STEP * self.typical * part * move / length / items.capacity)
            self.unary = self.core.priced(self.now)
        self.number += 1
