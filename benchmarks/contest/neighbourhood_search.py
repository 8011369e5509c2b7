"""From any plan of a core to a good one that fits: forests under prices on memory, then forests under the limit."""

from __future__ import annotations

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common.clock import attempt
from autoshard.solvers.common.solver_options import Clock
from benchmarks.contest.reduced_problem import Inner
from benchmarks.contest.tree_moves import Forests, TreeMove

_STRENGTHS = (0.0, 0.5, 0.8, 1.0, 1.0)  # times the multipliers, while the plan fits
_PUSH = 0.01  # of the typical cost: how much more expensive overflowing times get with each round
_KEPT = 0.7  # of those pushes, for each round in which the plan fits
_MOST_CHANGES = 64  # made at once, or of many a quarter


def _best(changes: list[TreeMove]) -> list[TreeMove]:
    return changes[: max(_MOST_CHANGES, len(changes) // 4)]


def polished(
    core: Inner,
    forests: Forests,
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
    count = len(choice)
    for _ in range(rounds):
        if clock.over:
            break
        most = int(rng.choice([count, count, count // 4 + 1, 50]))
        over = np.maximum(alive - core.items.capacity, 0.0)
        if over.any():
            pushes += 1
            scale = core.items.capacity or over.max()  # nothing fits into nothing, whatever the push
            push += _PUSH * pushes * (typical / scale) * (over / over.sum())
            priced = core.priced(multipliers + push)
            changes = attempt(forests.changes, priced, choice, rng, most)
            for change in changes or ():
                choice = _after(choice, [change])
            alive = core.items.alive(choice)
        else:
            push *= _KEPT
            unary = core.priced(float(rng.choice(_STRENGTHS)) * multipliers)
            changes = attempt(forests.changes, unary, choice, rng, most)
            choice, alive = within(core, choice, alive, _best(changes or []))
        if alive.max(initial=0.0) <= core.items.capacity and (reached := core.cost(choice)) < value:
            best, value = choice, reached
    return best


def within(core: Inner, choice: Integers, alive: Floats, changes: list[TreeMove]) -> tuple[Integers, Floats]:
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


def _after(choice: Integers, changes: list[TreeMove]) -> Integers:
    new = choice.copy()
    for change in changes:
        new[change.nodes] = change.choices
    return new
