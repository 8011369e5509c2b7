"""Values of options, read and checked: every error names the option, the value and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from autoshard.errors import UsageError
from autoshard.system.files import MOST_DIGITS
from autoshard.units import parse_quantity

LARGEST = 1 << 24  # of a whole number: devices, samples, tokens of a sequence
_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
_DIGITS = re.compile(rf"\d{{{MOST_DIGITS + 1},}}")
_DECIMAL = re.compile(r"[0-9]{1,30}([.][0-9]{1,30})?")


def whole(option: str, least: int = 1, most: int = LARGEST) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def read(text: str) -> int:
        number = int(text) if _WHOLE.fullmatch(text.strip()) else None
        if number is None or not least <= number <= most:
            expected = f"at least {least}" if number is not None and number < least else f"from {least} to {most}"
            raise UsageError(f"{option} {text!r}: expected a whole number, {expected}", f"{option} {max(least, 8)}")
        return number

    return read


def several(option: str) -> Callable[[str], tuple[int, ...]]:
    """Whole numbers with commas."""
    read = whole(option)
    return lambda text: tuple(map(read, text.split(",")))


def factor(option: str) -> Callable[[str], float]:
    """A number without a unit, at least 1."""

    def read(text: str) -> float:
        number = float(text) if _DECIMAL.fullmatch(text.strip()) else 0.0
        if number < 1:
            raise UsageError(f"{option} {text!r}: expected a number, at least 1", f"{option} 1.2")
        return number

    return read


def quantity(option: str, dimension: str, zero: bool = False) -> Callable[[str], float]:
    """A quantity with its unit (see units.py), above zero or, with `zero`, at least zero."""

    def read(text: str) -> float:
        try:
            value = parse_quantity(text, dimension)
        except UsageError as error:
            raise UsageError(f"{option} {error.message}", f"{option} {error.hint}") from None
        if value == 0 and not zero:
            raise UsageError(f"{option} {text!r}: expected more than zero", f"{option} {example(dimension)}")
        return value

    return read


def example(dimension: str) -> str:
    """A quantity as typed."""
    return {"bytes": '"60 GiB"', "seconds": "30s"}[dimension]


def path(option: str) -> Callable[[str], Path]:
    """The name of a file or folder; it can't be empty, and `-` is none: nothing is read or written by pipes."""

    def read(text: str) -> Path:
        if not text.strip() or "\0" in text:
            raise UsageError(f"{option} {text!r}: expected a name", f"{option} NAME")
        if text.strip() == "-":
            message = f"{option} -: expected a name, for autoshard reads and writes files and folders, no pipes"
            raise UsageError(message, f"{option} NAME, or ./- for one that is called so")
        return Path(text)

    return read


def module(option: str) -> Callable[[str], str]:
    """The name of a Python module."""

    def read(text: str) -> str:
        if not all(part.isidentifier() for part in text.split(".")):
            raise UsageError(f"{option} {text!r}: expected the name of a module", f"{option} package.module")
        return text

    return read


def check_digits(words: Sequence[str]) -> None:
    """Raises UsageError for a number too long within other text, as in pins; numeric options check themselves."""
    for word in words:
        if digits := _DIGITS.search(word):
            message = f"a number of {len(digits[0])} digits in {word[:40]!r}…: expected at most {MOST_DIGITS}"
            raise UsageError(message, "a number that fits")
