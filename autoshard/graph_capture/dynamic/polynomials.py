"""The polynomial that a number of a graph is in its dynamic sizes, from its values at a few points.

Sparse: one product of sizes, or two, with the coefficients that two points give and all others bear out; else all
products of different sizes. The points are of one program, whose structure torch.export's guards hold for the whole
range; a number that rounds (`length // 3`) has no such form and is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, product

from autoshard.ir.dynamic import Polynomial, Powers, monomial, rank, value_at

MOST_POWER, MOST_DEGREE = (
    2,
    3,
)  # of one size: scores of attention are sequence * sequence; of all: batch * height * width
Point = tuple[int, ...]  # a value of each size


def polynomial_of(values: Sequence[int], points: Sequence[Point]) -> Polynomial | None:
    """The simplest polynomial with `values` at `points`; None where there is none of these kinds."""
    count = len(points[0])
    if len(set(values)) == 1:
        return {(0,) * count: Fraction(values[0])}
    for powers in _candidates(count):
        made = _solved(powers, values, points)
        if made is not None:
            return made
    return _solved(list(product((0, 1), repeat=count)), values, points) if 2**count < len(points) else None


def _candidates(count: int) -> Iterator[tuple[Powers, ...]]:
    """One product of sizes, then two, of low degree first."""
    known = (own for own in product(range(MOST_POWER + 1), repeat=count) if rank(own) <= MOST_DEGREE)
    every = sorted(known, key=lambda own: (rank(own), own))
    yield from ((powers,) for powers in every)
    pairs = sorted(combinations(every, 2), key=lambda pair: (rank(pair[0]) + rank(pair[1]), pair))
    yield from pairs


def _solved(basis: Sequence[Powers], values: Sequence[int], points: Sequence[Point]) -> Polynomial | None:
    """The combination of these products that all points bear out."""
    pairs = list(zip(points, values, strict=True))
    rows = [[*(Fraction(monomial(powers, point)) for powers in basis), Fraction(value)] for point, value in pairs]
    found = _elimination(rows, len(basis))
    if found is None:
        return None
    made = {powers: own for powers, own in zip(basis, found, strict=True) if own}
    return made if all(value_at(made, point) == value for point, value in pairs) else None


def _elimination(rows: list[list[Fraction]], unknowns: int) -> list[Fraction] | None:
    """Gauss: of the first rows that determine them; None where the points are too much alike."""
    for column in range(unknowns):
        pivot = next((n for n in range(column, len(rows)) if rows[n][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [own / rows[column][column] for own in rows[column]]
        for n, row in enumerate(rows):
            if n != column and row[column]:
                rows[n] = [own - row[column] * first for own, first in zip(row, rows[column], strict=True)]
    return [rows[n][-1] for n in range(unknowns)]
