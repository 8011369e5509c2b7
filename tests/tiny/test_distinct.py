"""Distinct small numbers by flags are what sorting finds."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.solvers.elimination import cost_tables
from autoshard.solvers.elimination.cost_tables import distinct


@pytest.mark.parametrize("few", [1 << 20, 1])
def test_flags_find_what_sorting_finds(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_tables, "_FEW_NUMBERS", few)
    rng = np.random.default_rng(0)
    for length, most in ((0, 1), (1, 1), (5, 3), (40, 7), (300, 2000)):
        numbers = rng.integers(0, most, length)
        found, place = distinct(numbers)
        wanted, back = np.unique(numbers, return_inverse=True)
        assert found.tolist() == wanted.tolist() and place.tolist() == back.reshape(-1).tolist()
