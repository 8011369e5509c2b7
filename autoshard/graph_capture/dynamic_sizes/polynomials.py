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
    for powers in _bases(count):
        polynomial = _solved(powers, values, points)
        if polynomial is not None:
            return polynomial
    return _solved(list(product((0, 1), repeat=count)), values, points) if 2**count < len(points) else None


def _bases(count: int) -> Iterator[tuple[Powers, ...]]:
    """One product of sizes, then two, of low degree first."""
    known = (powers for powers in product(range(MOST_POWER + 1), repeat=count) if rank(powers) <= MOST_DEGREE)
    every = sorted(known, key=lambda powers: (rank(powers), powers))
    yield from ((powers,) for powers in every)
    pairs = sorted(combinations(every, 2), key=lambda pair: (rank(pair[0]) + rank(pair[1]), pair))
    yield from pairs


def _solved(basis: Sequence[Powers], values: Sequence[int], points: Sequence[Point]) -> Polynomial | None:
    """The combination of these products that all points bear out."""
    pairs = list(zip(points, values, strict=True))
    rows = [[*(monomial(powers, point) for powers in basis), value] for point, value in pairs]
    solution, independent = reduced(rows, len(basis))
    if independent < len(basis):  # the points are too much alike
        return None
    polynomial = {powers: row[-1] for powers, row in zip(basis, solution, strict=False) if row[-1]}
    return polynomial if all(value_at(polynomial, point) == value for point, value in pairs) else None


def reduced(rows: Sequence[Sequence[int | Fraction]], columns: int) -> tuple[list[list[Fraction]], int]:
    """The rows after Gauss-Jordan elimination of their first `columns` columns, exactly; and the rank of these."""
    work = [[Fraction(number) for number in row] for row in rows]
    rank_ = 0
    for column in range(columns):
        pivot = next((n for n in range(rank_, len(work)) if work[n][column]), None)
        if pivot is None:
            continue
        work[rank_], work[pivot] = work[pivot], work[rank_]
        lead = work[rank_] = [number / work[rank_][column] for number in work[rank_]]
        for n, row in enumerate(work):
            if n != rank_ and row[column]:
                work[n] = [number - row[column] * first for number, first in zip(row, lead, strict=True)]
        rank_ += 1
    return work, rank_
