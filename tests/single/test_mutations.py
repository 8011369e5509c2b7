"""A corrupted rule fails its proof. The whole table: `python -m benchmarks.mutations`."""

from __future__ import annotations

import pytest

from autoshard.rules import OPERATORS
from autoshard.rules.algebra.notation import Rule
from benchmarks.mutations import SAME, TRUE, corruptions, mutants, unexplained

WITH_OPTIONS = ["aten.addmm", "aten.cross_entropy_loss", "aten.embedding", "aten.linear", "aten.mean", "aten.softmax"]
SAMPLE = sorted({*WITH_OPTIONS, *sorted(t for t, known in OPERATORS.items() if known.rule is not None)[::5]})


def test_every_way_of_corrupting_a_rule() -> None:
    rule = Rule.parse("a m, n m, +n -> a n | sum: m | linear: 0")
    assert [
        f"{kind} {place}: {corrupted}".partition(" | linear")[0] for kind, place, corrupted in corruptions(rule)
    ] == [
        "factors swapped 0:0,1: m a, n m, +n -> a n | sum: m",
        "factors swapped 1:0,1: a m, m n, +n -> a n | sum: m",
        "factors swapped 3:0,1: a m, n m, +n -> n a | sum: m",
        "sum dropped 0: a m, n m, +n -> a n",
        "partial called whole 0: a m, n m, +n -> a n | joined: m",
        "+ dropped 2: a m, n m, n -> a n | sum: m",
        "linear added 1: a m, n m, +n -> a n | sum: m",
        "linear added 2: a m, n m, +n -> a n | sum: m",
        "linear added 0+1+2: a m, n m, +n -> a n | sum: m",
    ]


@pytest.mark.parametrize("target", SAMPLE)
def test_every_mutant_is_caught_or_equivalent(target: str) -> None:
    before = OPERATORS[target]
    assert not unexplained(mutants(target))
    assert OPERATORS[target] is before


def test_a_survivor_is_reported() -> None:
    """A linear layer is linear in its weight, which the table leaves out; a product is not so in both at once."""
    ends = {(m.target, m.kind, m.place): m.end for target in ("aten.mul", "aten.linear") for m in mutants(target)}
    assert ends["aten.linear", "linear added", "1"] == TRUE
    assert ends["aten.mul", "linear added", "0+1"] not in (TRUE, SAME)
