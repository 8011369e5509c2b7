"""Cost tables and class maps, each stored once and known by a number.

A `CostTerm` is a table over variables, one axis each. An axis does not run over a variable's strategies but over
*classes* of them (often: layouts), given by a class map: `map[strategy] -> row`. Equal content has equal numbers, and
a table made by elimination is numbered by its `TableRecipe`, so that the repeated blocks of a model are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats, Integers


class CostTerm(NamedTuple):
    """`table` over `scope`; axis i has the classes of map `maps[i]` of variable `scope[i]`.

    `gates`: (variable, value) pairs; the term counts only where all of these small variables have these values.
    """

    scope: tuple[int, ...]
    maps: tuple[int, ...]
    table: int
    gates: tuple[tuple[int, int], ...] = ()

    @property
    def variables(self) -> tuple[int, ...]:
        return self.scope + tuple(gate for gate, _ in self.gates) if self.gates else self.scope


class TableRecipe(NamedTuple):
    """Recipe for a table of the elimination: add terms, minimise over one variable with `domain` strategies.

    `unary`: (table, map) over that variable alone. `joint`: (table, axes), an axis being (slot, map); slot -1 is the
    eliminated variable, the others index `out`, the class maps of the result's axes.
    """

    domain: int
    unary: tuple[tuple[int, int], ...]
    joint: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    out: tuple[int, ...]


class Cases(NamedTuple):
    """Tables of a gate: for each of its values the (table, axes) that count then; the least of their sums."""

    values: tuple[tuple[tuple[int, tuple[tuple[int, int], ...]], ...], ...]
    out: tuple[int, ...]


class Store:
    """Append-only: class maps with their number of classes, and tables (None until computed)."""

    def __init__(self) -> None:
        self.maps: list[Integers] = []
        self.counts: list[int] = []
        self.tables: list[Floats | None] = []
        self.recipes: dict[int, TableRecipe | Cases] = {}
        self._map_ids: dict[bytes, int] = {}
        self._joins: dict[tuple[int, int], int] = {}
        self._projections: dict[tuple[int, int], Integers] = {}
        self._base_ids: dict[bytes, int] = {}
        self._table_ids: dict[TableRecipe | Cases, int] = {}

    def fork(self) -> Store:
        """A copy to which more can be added without touching this one (the arrays are shared)."""
        copy = Store()
        for name, content in vars(self).items():
            setattr(copy, name, content.copy())
        return copy

    def map_id(self, classes: Integers) -> int:
        """`classes[strategy]`: rows 0..count-1, each used."""
        key = classes.astype(np.int64, copy=False).tobytes()
        if key not in self._map_ids:
            self._map_ids[key] = len(self.maps)
            self.maps.append(classes)
            self.counts.append(int(classes.max()) + 1)
        return self._map_ids[key]

    def join(self, ids: Iterable[int]) -> int:
        """The coarsest map that refines all of them."""
        first, *others = sorted(set(ids))
        for other in others:
            first = self._join(first, other)
        return first

    def _join(self, a: int, b: int) -> int:
        if (a, b) not in self._joins:
            pairs = self.maps[a] * self.counts[b] + self.maps[b]
            there, classes = np.unique(pairs, return_inverse=True)
            finest = a if self.counts[a] >= self.counts[b] else b
            same = len(there) == self.counts[finest]
            self._joins[a, b] = finest if same else self.map_id(classes)
        return self._joins[a, b]

    def project(self, fine: int, coarse: int) -> Integers:
        """The row of map `coarse` that holds each row of the finer map `fine`."""
        if (fine, coarse) not in self._projections:
            rows = np.zeros(self.counts[fine], np.int64)
            rows[self.maps[fine]] = self.maps[coarse]
            self._projections[fine, coarse] = rows
        return self._projections[fine, coarse]

    def base(self, table: Floats) -> int:
        """A table that is given, by content."""
        number = self._base_ids.setdefault(digest(table), len(self.tables))
        if number == len(self.tables):
            self.tables.append(table)
        return number

    def derived(self, recipe: TableRecipe | Cases) -> tuple[int, bool]:
        """The number of the table that `recipe` makes, and whether it is new."""
        new = recipe not in self._table_ids
        if new:
            self._table_ids[recipe] = len(self.tables)
            self.recipes[len(self.tables)] = recipe
            self.tables.append(None)
        return self._table_ids[recipe], new

    def table(self, number: int) -> Floats:
        table = self.tables[number]
        assert table is not None, "a table is used before it is computed"
        return table


def digest(array: NDArray[np.generic]) -> bytes:
    """Equal for arrays of equal shape, type and content."""
    hasher = sha256(f"{array.shape}{array.dtype.str}".encode())  # most processors have instructions for it
    hasher.update(np.ascontiguousarray(array).data)
    return hasher.digest()


class Contents:
    """Numbers for input arrays by content, read once per array object (their owners are kept alive).

    `wide`: whether blocks made of them took large tables with all their strategies, whatever the prices were."""

    def __init__(self, owner: object) -> None:
        self.wide = False
        self._owners = [owner]
        self._by_object: dict[int, int] = {}
        self._by_content: dict[bytes, int] = {}

    def also(self, owner: object) -> None:
        """Number the arrays of one more owner, too."""
        self._owners.append(owner)

    def number(self, array: NDArray[np.generic]) -> int:
        """`array` must belong to an owner: the number is remembered under its address."""
        known = self._by_object.get(id(array))
        if known is None:
            known = self._by_content.setdefault(digest(array), len(self._by_content))
            self._by_object[id(array)] = known
        return known
