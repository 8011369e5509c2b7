"""At which sizes a program is looked at, to find the numbers that follow them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autoshard.graph_capture.dynamic.polynomials import Point
from autoshard.ir.dynamic import DynamicSize

MOST_POINTS = 6  # two determine a number, the others must bear it out
_TRIES = 200  # draws, of which few are new where ranges are short
_SPAN = 997  # units above the least of what has no limit


def points_of(sizes: Sequence[DynamicSize], planned: Point, most: int = MOST_POINTS) -> list[Point]:
    """The planned one first, then the least, then others of the range, in which all sizes differ where they can.

    None is 1: a trace is of sizes from 2 on (what it computes of 1 is for verification to compare).
    """
    found = dict.fromkeys([planned, tuple(_least(own) * own.divisor + own.remainder for own in sizes)])
    draw = random.Random(0)  # the same points for the same ranges
    for _ in range(_TRIES):
        if len(found) >= most:
            break
        found.setdefault(tuple(_drawn(own, draw) for own in sizes))
    return list(found)


def _drawn(own: DynamicSize, draw: random.Random) -> int:
    least = _least(own)
    most = (own.most - own.remainder) // own.divisor if own.most else least + _SPAN
    return own.divisor * draw.randint(least, most) + own.remainder


def _least(own: DynamicSize) -> int:
    """In units."""
    units = (own.least - own.remainder) // own.divisor
    return units + (own.least == 1 and own.most != 1)
