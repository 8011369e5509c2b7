"""Least excess of a row of a table over another, over its columns: least[a, b] = min of row a - row b.

All pairs of n rows over m columns take n x n x m steps. Most pairs differ in a few columns: those in which row a is
cheapest next to the others. Over these alone the least is an upper bound; only pairs whose bound leaves it open are
compared over all columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import SLAB, Floats, Integers

_OWN = 4  # columns by which a row differs from others


class LeastExcess:
    """The least excess of one value, or of several consumers of one: the sum over `tables`, each rows x columns.
    `clipped`: only what a row costs less counts. `least`: the least itself, in place of tables."""

    def __init__(self, tables: Sequence[Floats], least: Floats | None = None, *, clipped: bool = False) -> None:
        self.tables = [_distinct_columns(table) for table in tables]
        self.known, self.clipped = least, clipped

    @cached_property
    def small(self) -> bool:
        return sum(len(table) * table.size for table in self.tables) <= SLAB

    @cached_property
    def most(self) -> Floats:
        """[a, b]: not less than the least."""
        if self.known is not None or self.small:
            return self.whole
        return self._sum([_over_few(table) for table in self.tables])

    @cached_property
    def whole(self) -> Floats:
        """[a, b]: the least of all pairs."""
        return self.known if self.known is not None else self._sum([_of_all(table) for table in self.tables])

    def at(self, first: Integers, second: Integers) -> Floats:
        """The least of these pairs alone."""
        if self.known is not None or "whole" in vars(self):
            return self.whole[first, second]
        return self._sum([_of_pairs(table, first, second) for table in self.tables])

    def _sum(self, parts: Sequence[Floats]) -> Floats:
        total: Floats = np.sum([np.minimum(part, 0.0) if self.clipped else part for part in parts], axis=0)
        return total


def beaten(costs: Floats, parts: Sequence[tuple[LeastExcess, Integers]]) -> NDArray[np.bool_]:
    """[a, b]: whether strategy b is never more expensive than another strategy a. `costs`: what each costs by itself;
    `parts`: the least of each value, with the row of each strategy."""
    with np.errstate(invalid="ignore"):
        excess = costs[:, None] - costs[None, :]
        for least, row in parts:
            excess = excess + least.most[np.ix_(row, row)]
        open_ = ~(excess < 0)
        np.fill_diagonal(open_, False)
        first, second = np.nonzero(open_)
        exact = costs[first] - costs[second]
        for least, row in parts:
            exact = exact + least.at(row[first], row[second])
    open_[first, second] = exact >= 0
    return open_


def _distinct_columns(pay: Floats) -> Floats:
    """Table without columns that equal an earlier one, as most do if only bytes count: they add no information."""
    columns = np.ascontiguousarray(pay.T)
    first = {column.tobytes(): number for number, column in reversed(list(enumerate(columns)))}
    return pay if len(first) == len(columns) else np.ascontiguousarray(columns[sorted(first.values())].T)


def _of_all(pay: Floats) -> Floats:
    """The least of all pairs; a forbidden entry of a counts as infinitely more expensive."""
    one, other = pay.T[:, :, None], pay.T[:, None, :]
    least: Floats = (one - other if np.isfinite(pay).all() else _less(one, other)).min(axis=0, initial=np.inf)
    return least


def _of_pairs(pay: Floats, first: Integers, second: Integers) -> Floats:
    pairs, back = np.unique(first * len(pay) + second, return_inverse=True)
    first, second = pairs // len(pay), pairs % len(pay)
    result = np.empty(len(pairs))
    length = max(1, SLAB // max(1, pay.shape[1]))
    for low in range(0, len(pairs), length):
        some = slice(low, low + length)
        result[some] = _less(pay[first[some]], pay[second[some]]).min(axis=1, initial=np.inf)
    every: Floats = result[back]
    return every


def _over_few(pay: Floats) -> Floats:
    """An upper bound of the least of all pairs."""
    result = np.full((len(pay), len(pay)), np.inf)
    rows, columns = pay.shape
    allowed = np.isfinite(pay)
    less = np.subtract if allowed.all() else _less
    mean = np.where(allowed, pay, 0.0).sum(axis=0) / np.maximum(allowed.sum(axis=0), 1)
    cheapest = np.argpartition(pay - mean, min(_OWN, columns) - 1, axis=1)[:, :_OWN]
    by_column, length = np.ascontiguousarray(pay.T), max(1, SLAB // max(1, rows))
    for low in range(0, rows, length):  # a piece stays in the cache
        some, piece = np.arange(low, min(low + length, rows)), result[low : low + length]
        for chosen in cheapest[some].T:
            np.minimum(piece, less(pay[some, chosen][:, None], by_column[chosen]), out=piece)
    return result


def _less(first: Floats, second: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        difference: Floats = np.where(np.isinf(first), np.inf, first - second)
    return difference
