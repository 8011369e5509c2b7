"""What a row costs more than another at the least: by a few columns first, and the same as over all of them."""

import numpy as np
import pytest

from autoshard.ir.problem import Floats
from autoshard.solvers.elimination import least_excess
from autoshard.solvers.elimination.least_excess import LeastExcess, beaten


def table(rng: np.random.Generator, rows: int, columns: int, forbid: float) -> Floats:
    """Distances between places, as of layouts, with repeated and forbidden rows and entries."""
    pay = np.abs(rng.integers(0, 30, rows)[:, None] - rng.integers(0, 30, columns)).astype(float)
    pay[rng.random(pay.shape) < forbid] = np.inf
    pay[rng.random(rows) < forbid / 4] = np.inf
    return pay


def over_all(pay: Floats) -> Floats:
    """[a, b], by its definition."""
    with np.errstate(invalid="ignore"):
        excess = np.where(np.isinf(pay)[:, None, :], np.inf, pay[:, None, :] - pay[None, :, :])
    found: Floats = excess.min(axis=2)
    return found


@pytest.mark.parametrize("forbid", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(20))
def test_what_few_columns_tell_is_what_all_tell(seed: int, forbid: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_excess, "_SMALL", 0)
    monkeypatch.setattr(least_excess, "_PIECE", 70 if seed % 2 else 1 << 15)
    rng = np.random.default_rng(seed)
    pays = [table(rng, 20, columns, forbid)[:, rng.integers(0, columns, columns)] for columns in (5, 17, 40)]
    own, row = rng.integers(0, 4, 30).astype(float), [rng.integers(0, 20, 30) for _ in range(3)]
    given = -np.abs(rng.integers(0, 3, (20, 20))).astype(float)
    parts = [LeastExcess(pays[:1]), LeastExcess(pays[1:], clipped=True), LeastExcess([], given)]
    whole = [over_all(pays[0]), sum(np.minimum(over_all(pay), 0.0) for pay in pays[1:]), given]
    with np.errstate(invalid="ignore"):
        expected = own[:, None] - own + sum(least[np.ix_(r, r)] for least, r in zip(whole, row, strict=True)) >= 0
        np.fill_diagonal(expected, False)
    assert np.array_equal(beaten(own, list(zip(parts, row, strict=True))), expected)
    for part, least in zip(parts, whole, strict=True):
        assert (part.most >= least).all()
        assert np.array_equal(part.whole, least)


def test_rows_that_differ_are_not_looked_at_over_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    of_pairs = least_excess._of_pairs
    monkeypatch.setattr(least_excess, "_of_pairs", lambda pay, a, b: looked.append(len(a)) or of_pairs(pay, a, b))
    monkeypatch.setattr(least_excess, "_of_all", lambda pay: pytest.fail("all pairs over all columns"))
    places = np.arange(80.0)
    distances = np.abs(places[:, None] - places)
    found = beaten(np.append(np.zeros(79), 200.0), [(LeastExcess([distances]), np.arange(80))])
    assert found[79, :79].all()
    assert not found[:79].any()
    assert sum(looked) <= 2 * 80


def test_columns_that_are_equal_are_looked_at_once() -> None:
    pay = table(np.random.default_rng(3), 30, 7, 0.1)
    (told,) = LeastExcess([np.repeat(pay, 50, axis=1)]).tables
    assert np.array_equal(told, pay) and np.array_equal(LeastExcess([told]).whole, over_all(pay))
