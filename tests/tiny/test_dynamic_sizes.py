"""Dynamic sizes as a user declares them: what is taken, and every mistake with its sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoshard
from autoshard.constraints.size_histogram import (
    MOST_POINTS,
    SizePoint,
    histogram,
    histogram_text,
    points_for,
    read_histogram,
)
from autoshard.errors import UserError
from autoshard.graph_capture.dynamic_sizes.declared import Shape, dims_of, of_model, parse, set_inputs
from autoshard.graph_capture.dynamic_sizes.numbers import MOST_POINTS as MOST_PROBED
from autoshard.graph_capture.dynamic_sizes.numbers import points_of
from autoshard.graph_capture.dynamic_sizes.polynomials import polynomial_of
from autoshard.graph_capture.dynamic_sizes.symbol import Symbol
from autoshard.ir.dynamic import DynamicSize, monomial, value_at

IDS = (Shape("ids", (4, 32), False), Shape("labels", (4, 32), False))
BATCH = DynamicSize("batch", 8, 64, 8, 0, (("ids", 0),))
LENGTH = DynamicSize("sequence", 65, 1025, 64, 1, (("ids", 1),))
INVALID: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: Symbol(max="8"), "Symbol(max='8'): expected an int"),
    (lambda: Symbol(min=True), "Symbol(min=True): expected an int"),
    (lambda: Symbol(divisor=2.0), "Symbol(divisor=2.0): expected an int"),
    (lambda: Symbol(unique=1), "Symbol(unique=1): expected True or False"),
    (lambda: Symbol(name="a b"), "Symbol(name='a b'): expected a name"),
    (lambda: Symbol(min=0), "Symbol(min=0): expected 1 or more"),
    (lambda: Symbol(min=-3), "Symbol(min=-3): expected 1 or more"),
    (lambda: Symbol(divisor=0), "Symbol(divisor=0): expected 1 or more"),
    (lambda: Symbol(divisor=8, remainder=8), "Symbol(remainder=8, divisor=8): expected 0 to 7"),
    (lambda: Symbol(remainder=-1), "Symbol(remainder=-1, divisor=1): expected 0 to 0"),
    (lambda: Symbol(max=-8), "Symbol(max=-8, min=1): expected max above min"),
    (lambda: Symbol(max=8, min=8), "Symbol(max=8, min=8): expected max above min"),
    (lambda: Symbol(max=15, min=9, divisor=8), "no number from 9 to 15 is a multiple of 8"),
    (lambda: Symbol(max=15, min=3, divisor=8), "only 8 from 3 to 15 is a multiple of 8"),
    (lambda: Symbol(max=5, divisor=8, remainder=3), "no number from 1 to 5 is 8 * n + 3"),
    (lambda: parse(["batch"]), "--dynamic 'batch': expected NAME=MIN..MAX/DIVISOR+REMAINDER"),
    (lambda: parse(["batch=8-64"]), "--dynamic 'batch=8-64': expected NAME=MIN..MAX"),
    (lambda: parse(["batch=8..64,"]), "--dynamic '': expected NAME=MIN..MAX"),
    (lambda: parse(["batch=64..8"]), "--dynamic batch=64..8: expected max above min"),
    (lambda: parse(["batch=8..64/0"]), "--dynamic batch=8..64/0: expected 1 or more"),
    (lambda: parse(["batch=8..64", "batch=8..32"]), "batch is named twice"),
    (lambda: parse(["height=32..256/32"]), "no dims are named, and height is neither batch nor sequence"),
    (lambda: dims_of(parse(["h=2..8@pixels.2"])[0], IDS), "there is no dim pixels.2; the inputs are ids (4x32)"),
    (lambda: dims_of(parse(["h=2..8@ids.2"])[0], IDS), "there is no dim ids.2"),
    (lambda: dims_of(parse(["h=2..8@7.0"])[0], IDS), "there is no dim 7.0"),
    (lambda: dims_of(parse(["sequence=2..8"])[0], [Shape("x", (4,), True)]), "no input has a dim that is known to be"),
    (lambda: set_inputs(SimpleNamespace(), 8), "set_inputs: input 0 is int, expected a shape"),
    (lambda: set_inputs(SimpleNamespace(), (8, "n")), "input 0 has the size 'n', expected an int, None or a Symbol"),
    (lambda: of_model(set_inputs(SimpleNamespace(), (Symbol(), 32)), IDS), "given 1 inputs, and the model is"),
    (lambda: of_model(set_inputs(SimpleNamespace(), (8,), (8,)), IDS), "set_inputs: ids has 2 dims, got 1"),
    (lambda: of_model(set_inputs(SimpleNamespace(), (4, 31), (4, 32)), IDS), "dim 1 of ids is 32 in the example input"),
    (lambda: read_histogram("batch=8:0"), "--sizes 'batch=8:0': expected NAME=N,NAME=N:WEIGHT"),
    (lambda: read_histogram("batch=8:nan"), "--sizes 'batch=8:nan': expected"),
    (lambda: read_histogram("batch=x"), "--sizes 'batch=x': expected"),
    (lambda: read_histogram("batch=8;sequence=65"), "the points name different sizes"),
    (lambda: histogram([{"batch": 0}]), '{"batch": 0} has a size or weight that is no number above 0'),
    (lambda: histogram([{"batch": 8, "weight": True}]), "no number above 0"),
    (lambda: points_for(read_histogram("batch=8"), (BATCH, LENGTH)), "batch 8: expected a value for each of"),
    (lambda: points_for(read_histogram("batch=12"), (BATCH,)), "batch of 12: expected a multiple of 8 from 8 to 64"),
    (lambda: points_for(read_histogram("batch=128"), (BATCH,)), "batch of 128: expected a multiple of 8 from 8 to 64"),
    (lambda: points_for(read_histogram("batch=8"), ()), "--sizes: the model has no dynamic sizes"),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(INVALID)))
def test_every_mistake_has_a_sentence(number: int) -> None:
    call, message = INVALID[number]
    with pytest.raises(UserError) as caught:
        call()
    assert message in caught.value.message and caught.value.hint
    assert caught.value.exit_code in (2, 5)  # 5: rows as a file has them


def test_errors_of_symbols_are_those_of_python() -> None:
    """As MindSpore documents them."""
    with pytest.raises(TypeError):
        Symbol(max=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 0 to 3"):
        autoshard.Symbol(divisor=4, remainder=4)


def test_a_symbol_is_a_multiple_and_a_remainder_from_one_unit_on() -> None:
    symbol = Symbol(max=100, min=3, divisor=8, remainder=2)
    assert (symbol.least, symbol.most) == (10, 98)
    assert (Symbol().least, Symbol().most, Symbol(divisor=8).least) == (1, 0, 8)


def test_the_command_line_names_sizes_and_dims() -> None:
    batch, length, width = parse(["batch=8..512/8,sequence=128..4096/64", "width=32../16+4@pixels.3@1.2"])
    assert (batch.symbol.least, batch.symbol.most, batch.symbol.divisor, batch.dims) == (8, 512, 8, ())
    assert (length.name, length.symbol.least, length.symbol.most) == ("sequence", 128, 4096)
    assert (width.symbol.least, width.symbol.most, width.symbol.remainder) == (36, 0, 4)
    assert width.dims == (("pixels", 3), ("1", 2))
    assert dims_of(batch, IDS) == ((0, 0), (1, 0)) and dims_of(length, IDS) == ((0, 1), (1, 1))


def test_one_symbol_is_one_size_and_none_is_any() -> None:
    batch = Symbol(divisor=8)
    model = set_inputs(SimpleNamespace(), (batch, None), SimpleNamespace(shape=[batch, 32]))
    first, second = of_model(model, IDS)
    assert (first.name, first.dims, first.symbol) == ("batch", (("0", 0), ("1", 0)), batch)
    assert (second.name, second.dims, second.symbol.least) == ("sequence", (("0", 1),), 1)


def test_a_histogram_is_read_back_and_grouped() -> None:
    points = read_histogram("sequence=65,batch=8:1; batch=16,sequence=129:3;batch=8,sequence=65:1")
    assert points == (
        SizePoint((("batch", 8), ("sequence", 65)), 0.4),
        SizePoint((("batch", 16), ("sequence", 129)), 0.6),
    )
    assert read_histogram(histogram_text(points)) == points
    every = histogram([{"batch": 8, "sequence": 64 * n + 1, "weight": 17 - n} for n in range(1, 17)])
    grouped = points_for(every, (BATCH, LENGTH))
    assert len(grouped) <= MOST_POINTS and sum(point.weight for point in grouped) == pytest.approx(1)
    assert all(LENGTH.allows(dict(point.sizes)["sequence"]) for point in grouped)


def mean(points: tuple[SizePoint, ...]) -> float:
    return sum(point.weight * dict(point.sizes)["sequence"] for point in points)


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 50)), min_size=1, max_size=30))
def test_grouping_takes_no_step_for_shorter_than_it_is(rows: list[tuple[int, int]]) -> None:
    every = histogram([{"batch": 8, "sequence": 64 * n + 1, "weight": weight} for n, weight in rows])
    grouped = points_for(every, (BATCH, LENGTH))
    assert mean(every) - 1e-6 <= mean(grouped) <= mean(every) + LENGTH.divisor


def test_a_file_holds_rows(tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps([{"batch": 8, "weight": 3}, {"batch": 16}]))
    assert read_histogram(str(file)) == (SizePoint((("batch", 8),), 0.75), SizePoint((("batch", 16),), 0.25))
    for text in ("[]", "{}", "[3]", "nothing"):
        file.write_text(text)
        with pytest.raises(UserError):
            read_histogram(str(file))


# --- numbers that follow sizes ---


SIZES = st.lists(st.integers(2, 400), min_size=3, max_size=3).map(tuple)
POWERS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 1, 1), (0, 2, 0), (0, 0, 0))
TERM = st.tuples(st.sampled_from(POWERS), st.fractions(-6, 6, max_denominator=8).filter(bool))


@given(st.lists(TERM, min_size=1, max_size=2, unique_by=lambda term: term[0]), st.integers(0, 10_000))
def test_a_polynomial_is_found_from_its_values(terms: list[tuple[tuple[int, ...], Fraction]], seed: int) -> None:
    sizes = [DynamicSize(name, 8, 4096, 8, 0, ()) for name in ("a", "b", "c")]
    points = points_of(sizes, (4096, 2048 + 8 * (seed % 7), 512))
    wanted = dict(terms)
    values = [value_at(wanted, point) for point in points]
    if all(value.denominator == 1 for value in values):
        polynomial = polynomial_of([int(value) for value in values], points)
        assert polynomial is not None
        another = tuple(8 * (11 + seed % 89 + n) for n in range(3))
        assert value_at(polynomial, another) == value_at(wanted, another)


def test_a_number_that_rounds_is_none() -> None:
    sizes = [DynamicSize("a", 1, 4096, 1, 0, ())]
    points = points_of(sizes, (4095,))
    assert len(points) == MOST_PROBED
    assert polynomial_of([(point[0] + 1) // 2 for point in points], points) is None
    assert polynomial_of([monomial((2,), point) - 1 for point in points], points) == {(2,): 1, (0,): -1}
