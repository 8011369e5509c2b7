"""Distinct small numbers by flags are what sorting finds; equal arrays have one number, others none of them."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.solvers.elimination import cost_tables
from autoshard.solvers.elimination.cost_tables import ByContent, Store, digest, distinct


@pytest.mark.parametrize("few", [1 << 20, 1])
def test_flags_find_what_sorting_finds(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_tables, "SLAB", few)
    rng = np.random.default_rng(0)
    for length, most in ((0, 1), (1, 1), (5, 3), (40, 7), (300, 2000)):
        numbers = rng.integers(0, most, length)
        found, place = distinct(numbers)
        wanted, back = np.unique(numbers, return_inverse=True)
        assert found.tolist() == wanted.tolist() and place.tolist() == back.reshape(-1).tolist()


def test_arrays_have_the_number_of_an_equal_one() -> None:
    """By their digests; large ones differ in one entry, wherever it is, or in the sign of a zero."""
    rng = np.random.default_rng(1)
    large = rng.random((70, 40))
    found: list[np.ndarray] = [large, large.copy(), large.T, np.asfortranarray(large), large.astype(np.float32)]
    for place in (0, 1, 1399, 2799):
        other = large.copy()
        other.reshape(-1)[place] += 1.0
        found += [other, other.copy()]
    zeros = np.zeros(3000)
    found += [
        zeros,
        -zeros,
        zeros.reshape(60, 50),
        zeros.astype(np.int64),
        zeros[:3],
        -zeros[:3],
        np.zeros(()),
        zeros[::2],
    ]
    found += [flags := rng.random(9001) < 0.5, flags.copy(), ~flags]
    numbers, known = ByContent(), dict[bytes, int]()
    for array in found:
        assert numbers.number(array, len(known)) == known.setdefault(digest(array), len(known))
    assert len(known) == 17


def test_a_fork_of_a_store_adds_nothing_to_it() -> None:
    store = Store()
    first, second = np.arange(2000.0), np.arange(2000.0) + (np.arange(2000) == 1)
    assert store.base(first) == 0
    fork = store.fork()
    assert (fork.base(second), fork.base(second.copy()), fork.base(first.copy())) == (1, 1, 0)
    assert len(store.tables) == 1 and store.base(second) == 1 and len(store.tables) == 2
