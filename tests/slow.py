"""Rows of a table of tests that `pytest -m slow` runs; the quick suite has one or two of each kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: object) -> Any:
    """A row that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def quick(rows: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """All rows; those that are not chosen are slow."""
    return [row if row in chosen else slow(*(row if isinstance(row, tuple) else (row,))) for row in rows]


def quick_at(rows: Iterable[Any], *places: int) -> list[Any]:
    """All rows; those at other places are slow: what they reach, the others or quicker tests reach, too."""
    return [row if n in places else slow(*(row if isinstance(row, tuple) else (row,))) for n, row in enumerate(rows)]


def thinned(rows: Iterable[Any], one_in: int) -> list[Any]:
    """All rows; but one in so many, they are slow."""
    every = list(rows)
    return quick_at(every, *range(0, len(every), one_in))
