"""Tables over the same axes are added once before they are minimised, and many strategies a part at a time, with the
same result."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.solvers.elimination import min_plus
from autoshard.solvers.elimination.min_plus import TableView

SEEDS = range(30)


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_added_once_make_the_same_table(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(1, 4)))
    parts, total = [TableView(rng.random((shape[0], *(1 for _ in shape[1:]))), _rows(shape, {0}, rng))], np.zeros(shape)
    for _ in range(int(rng.integers(1, 6))):
        axes = {a for a in range(len(shape)) if rng.random() < 0.6}
        rows = _rows(shape, axes, rng)
        lengths = [1 if own is None else shape[a] for a, own in enumerate(rows)]
        parts.append(TableView(rng.random(lengths), rows))
    for part in parts:
        total = total + part.array()
    for slab, deep in ((1, 256), (7, 256), (1 << 17, 256), (1, 1), (7, 3), (1, 7)):
        monkeypatch.setattr(min_plus, "_SLAB", slab)
        monkeypatch.setattr(min_plus, "_DEEP", deep)
        assert np.allclose(min_plus.min_plus(parts, shape), total.min(axis=0), rtol=1e-14, atol=0)


def _rows(shape: tuple[int, ...], axes: set[int], rng: np.random.Generator) -> tuple[slice | np.ndarray | None, ...]:
    return tuple(
        None if a not in axes else rng.integers(0, n, n) if rng.random() < 0.5 else slice(None)
        for a, n in enumerate(shape)
    )


def test_what_two_parts_say_of_the_same_axes_is_added_once() -> None:
    every, n = slice(None), 40
    rng = np.random.default_rng(0)
    own, first, second, third = (
        rng.random((n, 1, 1)),
        rng.random((n, n, 1)),
        rng.random((n, 1, n)),
        rng.random((n, 1, n)),
    )
    parts = [
        TableView(own, (every, None, None)),
        TableView(first, (every, every, None)),
        TableView(second, (np.arange(n), None, every)),
        TableView(third, (every, None, every)),
    ]
    joined = min_plus._joined(parts, (n, n, n))
    assert sorted(sorted(part.axes) for part in joined) == [[0, 1], [0, 2]]
    assert np.allclose(sum(part.array() for part in joined), own + first + second + third)
