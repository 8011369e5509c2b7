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


def thinned(rows: Iterable[Any], one_in: int) -> list[Any]:
    """All rows; but one in so many, they are slow."""
    every = list(rows)
    return quick(every, every[::one_in])
