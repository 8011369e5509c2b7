"""Equal arrays have one number, others none of them."""

from __future__ import annotations

import numpy as np

from autoshard.solvers.elimination.cost_tables import Contents, Store


def test_arrays_have_the_number_of_an_equal_one() -> None:
    """By their digests; large ones differ in one entry, wherever it is, or in the sign of a zero."""
    rng = np.random.default_rng(1)
    large = rng.random((70, 40))
    arrays: list[np.ndarray] = [large, large.copy(), large.T, np.asfortranarray(large), large.astype(np.float32)]
    for place in (0, 1, 1399, 2799):
        other = large.copy()
        other.reshape(-1)[place] += 1.0
        arrays += [other, other.copy()]
    zeros = np.zeros(3000)
    arrays += [
        zeros,
        -zeros,
        zeros.reshape(60, 50),
        zeros.astype(np.int64),
        zeros[:3],
        -zeros[:3],
        np.zeros(()),
        zeros[::2],
    ]
    arrays += [flags := rng.random(9001) < 0.5, flags.copy(), ~flags]
    contents, known = Contents(arrays), dict[tuple[object, ...], int]()
    for array in arrays:
        key = (array.shape, array.dtype.str, np.ascontiguousarray(array).tobytes())
        assert contents.number(array) == known.setdefault(key, len(known))
    assert len(known) == 17


def test_a_fork_of_a_store_adds_nothing_to_it() -> None:
    store = Store()
    first, second = np.arange(2000.0), np.arange(2000.0) + (np.arange(2000) == 1)
    assert store.base(first) == 0
    fork = store.fork()
    assert (fork.base(second), fork.base(second.copy()), fork.base(first.copy())) == (1, 1, 0)
    assert len(store.tables) == 1 and store.base(second) == 1 and len(store.tables) == 2
