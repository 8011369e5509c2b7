"""Statements that take in what the model's code does not name, and the brackets that keep them what they were."""

from __future__ import annotations

import pytest

from autoshard.emit.nested_calls import with_brackets


@pytest.mark.parametrize(
    ("outer", "inner", "wanted"),
    [
        ("a + b", {"a": "x + y", "b": "z"}, "x + y + z"),
        ("a + b", {"a": "x", "b": "y + z"}, "x + (y + z)"),  # sums of floats are not associative
        ("a + b", {"a": "x * y", "b": "z / w"}, "x * y + z / w"),
        ("a * b", {"a": "x + y", "b": "z - w"}, "(x + y) * (z - w)"),
        ("a * b", {"a": "x * y", "b": "z * w"}, "x * y * (z * w)"),
        ("a @ b", {"a": "x @ y", "b": "-z"}, "x @ y @ (-z)"),
        ("a**2", {"a": "x * y"}, "(x * y)**2"),
        ("a**2", {"a": "-x"}, "(-x)**2"),
        ("a**b", {"a": "x**y", "b": "z"}, "(x**y)**z"),
        ("a | b", {"a": "x & y", "b": "z"}, "(x & y) | z"),
        ("-a", {"a": "x + y"}, "-(x + y)"),
        ("a.reshape(4, b)", {"a": "x + y", "b": "z + w"}, "(x + y).reshape(4, z + w)"),
        ("a[:, 1:]", {"a": "x + y"}, "(x + y)[:, 1:]"),
        ("F.linear(a, b)", {"a": "x * y", "b": "-z"}, "F.linear(x * y, -z)"),
        ("a > b", {"a": "x > y", "b": "z"}, "(x > y) > z"),
        ("ä + a", {"a": "x * y"}, "ä + x * y"),
    ],
)
def test_brackets(outer: str, inner: dict[str, str], wanted: str) -> None:
    made = with_brackets(outer, inner)
    assert made == wanted
    names = {"x": 3.5, "y": 5.25, "z": 7.0, "w": 11.0}
    if not any(part in outer for part in "@F[|ä") and "reshape" not in outer:
        values = {name: eval(text, {}, names) for name, text in inner.items()}
        assert eval(made, {}, names) == eval(outer, {}, {**names, **values})
