"""The lower bound of a large core under its memory limit: messages, and multipliers that follow their plans.

Every sweep of messages rounds to a plan. Where the recent plans overflow, memory gets dearer, where they leave room,
cheaper; a step moves a given part of the total cost between times, so that no scale has to be guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from autoshard.problem import Floats, Integers
from autoshard.solvers.core import Core
from autoshard.solvers.messages import Messages

_STEP = 0.2  # of the typical cost, at first
_SLOWER = 10  # rounds until the step is halved
_LEAST_STEP = 0.01  # of the first step
_RECENT = 0.5  # the weight of the plans before, in the direction


class Round(NamedTuple):
    """`bound` of this round at `multipliers` (times,); `choice`: the plan it rounds to, whatever its memory."""

    bound: float
    multipliers: Floats
    choice: Integers
    cost: float
    peak: float


def rounds(core: Core) -> Iterator[Round]:
    """Endless. Every bound is valid; the best one so far mostly rises."""
    items, messages = core.items, Messages(core.graph)
    limited = np.isfinite(items.capacity) and items.capacity > 0
    multipliers = np.zeros(len(items.base))
    unary = list(core.graph.unary)
    direction: Floats | None = None
    typical = np.inf
    number = 0
    while True:
        messages.on(unary)
        free = items.capacity - items.base if limited else 0.0 * items.base
        bound = messages.back(unary) + core.graph.constant - float(multipliers @ free)
        choice = messages.rounded(unary)
        alive, cost = items.alive(choice), core.cost(choice)
        yield Round(bound, multipliers, choice, cost, float(alive.max(initial=0.0)))
        if not limited:
            continue
        over = alive / items.capacity - 1.0
        direction = over if direction is None else _RECENT * direction + (1 - _RECENT) * over
        move = np.where((direction < 0) & (multipliers <= 0), 0.0, direction)
        length = float(np.abs(move).sum())
        typical = min(typical, cost if np.isfinite(cost) else abs(bound))
        if length > 0:
            step = _STEP * typical * max(_LEAST_STEP, 1.0 / (1.0 + number / _SLOWER))
            multipliers = np.maximum(0.0, multipliers + step * move / length / items.capacity)
            unary = items.priced(core.graph.unary, multipliers)
        number += 1
