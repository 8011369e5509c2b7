from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import units
from autoshard.errors import UsageError

PAIRS = [
    (units.parse_bytes, units.format_bytes),
    (units.parse_bandwidth, units.format_bandwidth),
    (units.parse_seconds, units.format_seconds),
    (units.parse_flop_rate, units.format_flop_rate),
]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "64 GiB", 64 * 2.0**30),
        (units.parse_bytes, "80 GB", 80e9),
        (units.parse_bytes, "512B", 512.0),
        (units.parse_bandwidth, "392 GB/s", 392e9),
        (units.parse_bandwidth, "1.5 TB/s", 1.5e12),
        (units.parse_seconds, "3 us", 3e-6),
        (units.parse_seconds, "2 min", 120.0),
        (units.parse_flop_rate, "312 TFLOP/s", 312e12),
    ],
)
def test_parse(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("format", "value", "text"),
    [
        (units.format_bytes, 64 * 2.0**30, "64 GiB"),
        (units.format_bytes, 1000, "1000 B"),
        (units.format_bytes, 0, "0 B"),
        (units.format_bytes, 1023.99 * 2**20, "1 GiB"),
        (units.format_bandwidth, 392e9, "392 GB/s"),
        (units.format_seconds, 3e-6, "3 us"),
        (units.format_seconds, 75.0, "75 s"),
        (units.format_seconds, 0.0, "0 s"),
        (units.format_seconds, -1.17e-5, "-11.7 us"),
        (units.format_bytes, -2048, "-2 KiB"),
        (units.signed_seconds, 1.17e-5, "+11.7 us"),
        (units.signed_seconds, -2.0, "-2 s"),
        (units.signed_seconds, 0.0, "+0 s"),
        (units.format_flop_rate, 312e12, "312 TFLOP/s"),
    ],
)
def test_format(format, value, text):
    assert format(value) == text


@pytest.mark.parametrize(("parse", "format"), PAIRS)
@given(value=st.floats(min_value=1e-9, max_value=1e24))
def test_round_trip(parse, format, value):
    text = format(value)
    assert parse(text) == pytest.approx(value, rel=1e-3)
    assert format(parse(text)) == text
    assert parse(format(value, digits=17)) == pytest.approx(value, rel=1e-11)


@pytest.mark.parametrize("parse", [parse for parse, _ in PAIRS])
@pytest.mark.parametrize(
    "text", ["", "64", "GiB", "64 parsecs", "-3 us", "-1 GB", "nan s", "64 GiB GiB", "1e999 B", "64 gib"]
)
def test_bad_quantity_is_named(parse, text):
    with pytest.raises(UsageError) as error:
        parse(text)
    assert repr(text) in error.value.message and error.value.hint


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_bytes, "3 GB/s"),
        (units.parse_bandwidth, "3 GB"),
        (units.parse_flop_rate, "3 TFLOP"),
        (units.parse_seconds, "3 B"),
    ],
)
def test_a_unit_of_another_dimension_is_refused(parse, text):
    with pytest.raises(UsageError):
        parse(text)
