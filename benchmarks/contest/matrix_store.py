"""Matrices known by number: equal ones are stored once, and every operation on one is done once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.elimination.cost_tables import digest


class Matrices:
    """Append-only. Rows are the choices of one node, columns those of another; inf: forbidden."""

    def __init__(self) -> None:
        self.arrays: list[Floats] = []
        self._by_content: dict[bytes, int] = {}
        self._given: dict[int, int] = {}
        self._flips: dict[int, int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._rows: dict[tuple[int, bytes], int] = {}
        self._partners: dict[int, NDArray[np.bool_] | None] = {}
        self._decided: dict[int, Integers | None] = {}

    def number(self, array: Floats) -> int:
        key = digest(array)
        if key not in self._by_content:
            self._by_content[key] = len(self.arrays)
            self.arrays.append(np.ascontiguousarray(array))
        return self._by_content[key]

    def given(self, array: Floats) -> int:
        """The number of an array that its owner keeps alive and unchanged, known by its address."""
        known = self._given.get(id(array))
        if known is None:
            known = self._given[id(array)] = self.number(array)
        return known

    def flip(self, matrix: int) -> int:
        """Its transpose."""
        known = self._flips.get(matrix)
        if known is None:
            known = self._flips[matrix] = self.number(self.arrays[matrix].T)
            self._flips[known] = matrix
        return known

    def sum(self, a: int, b: int) -> int:
        key = (a, b) if a < b else (b, a)
        known = self._sums.get(key)
        if known is None:
            known = self._sums[key] = self.number(self.arrays[a] + self.arrays[b])
        return known

    def rows(self, matrix: int, which: Integers, key: bytes) -> int:
        """Its rows `which`, in that order; `key` is which.tobytes()."""
        known = self._rows.get((matrix, key))
        if known is None:
            known = self._rows[matrix, key] = self.number(self.arrays[matrix][which])
        return known

    def partner(self, matrix: int) -> NDArray[np.bool_] | None:
        """Which rows have a finite entry, as flags; None: all."""
        if matrix not in self._partners:
            flags = np.atleast_1d(np.isfinite(self.arrays[matrix]).any(axis=1))
            self._partners[matrix] = None if flags.all() else flags
        return self._partners[matrix]

    def decided(self, matrix: int) -> Integers | None:
        """The one allowed row of every column; None where a column allows another number than one."""
        if matrix not in self._decided:
            finite = np.isfinite(self.arrays[matrix])
            self._decided[matrix] = finite.argmax(axis=0) if (finite.sum(axis=0) == 1).all() else None
        return self._decided[matrix]

    def news(self, matrix: int) -> bool:
        """Whether the node of its rows has something to do: a row without partner, or rows that columns decide."""
        return self.partner(matrix) is not None or self.decided(matrix) is not None
