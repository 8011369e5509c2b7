"""Sizes of inputs that change from step to step, and the numbers of a graph that follow them.

A number is a polynomial in the sizes (`batch * sequence - batch`), held as terms: a coefficient and a power of each
size. Frozen data, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

Powers = tuple[int, ...]  # of each size, in their order
Polynomial = Mapping[Powers, Fraction]


@dataclass(frozen=True)
class DynamicSize:
    """A size `divisor * n + remainder`, n of 1 or more, from `least` to `most` (0: without a limit).

    `dims`: (input tensor, dim) that have it.
    """

    name: str
    least: int
    most: int
    divisor: int
    remainder: int
    dims: tuple[tuple[str, int], ...]

    def allows(self, size: int) -> bool:
        """Is `size` one that a step may have?"""
        inside = self.least <= size and (not self.most or size <= self.most)
        return inside and size % self.divisor == self.remainder

    def words(self) -> str:
        """Allowed sizes as words of a sentence: `a multiple of 8 from 8 to 512`."""
        kind = f"a multiple of {self.divisor}" if self.divisor > 1 else "a size"
        kind += f" plus {self.remainder}" if self.remainder else ""
        return f"{kind} from {self.least} " + (f"to {self.most}" if self.most else "on")

    def nearest(self, size: float) -> int:
        """The allowed size that is nearest to `size`."""
        allowed = self.divisor * round((size - self.remainder) / self.divisor) + self.remainder
        allowed = max(allowed, self.least)
        return min(allowed, self.most) if self.most else allowed


@dataclass(frozen=True)
class SizeTerm:
    """`coefficient`, a fraction as text, times the sizes to these powers."""

    coefficient: str
    powers: tuple[int, ...]


@dataclass(frozen=True)
class Follows:
    """Numbers of a graph that are this polynomial in its sizes. `places`: as of `Following`."""

    terms: tuple[SizeTerm, ...]
    places: tuple[str, ...]

    def polynomial(self) -> dict[Powers, Fraction]:
        """Polynomial by powers."""
        return {term.powers: Fraction(term.coefficient) for term in self.terms}


def monomial(powers: Powers, sizes: Sequence[int]) -> int:
    """The product of the sizes to these powers."""
    return math.prod(size**power for size, power in zip(sizes, powers, strict=True))


def value_at(polynomial: Polynomial, sizes: Sequence[int]) -> Fraction:
    """The value at these sizes."""
    return sum((factor * monomial(powers, sizes) for powers, factor in polynomial.items()), Fraction(0))


def terms_of(polynomial: Polynomial) -> tuple[SizeTerm, ...]:
    """Terms of a polynomial as data, the highest powers first."""
    ordered = sorted(polynomial.items(), key=lambda item: (-sum(item[0]), item[0]))
    return tuple(SizeTerm(str(coefficient), powers) for powers, coefficient in ordered if coefficient)


def rank(powers: Iterable[int]) -> int:
    """The degree."""
    return sum(powers)
