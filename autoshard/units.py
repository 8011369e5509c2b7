"""Converts quantities with units to floats in SI (bytes, bytes/s, seconds, FLOP/s) and back.

`parse_bandwidth("392 GB/s")` is 3.92e11 bytes/s and `format_bandwidth(3.92e11)` is "392 GB/s". Capacities print with
binary prefixes (GiB), rates with decimal ones (GB/s); both kinds of prefix are read for bytes.
"""

from __future__ import annotations

import math
import re

from autoshard.errors import UsageError

_QUANTITY = re.compile(r"^\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9]\S*)\s*$")
_NUMBER = re.compile(r"^\s*[0-9.]*[1-9][0-9.]*\s*$")  # above zero
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60}
ROUNDING = 1e-9  # relative: sums of the same numbers in another order are within it
EXACT = 1e-12  # relative, of the same sum; in seconds or bytes what rounding may leave of zero
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
MICROSECONDS = 1 / _SECONDS["us"]  # of a second


def _prefixed(unit: str, prefixes: dict[str, float]) -> dict[str, float]:
    return {prefix + unit: factor for prefix, factor in prefixes.items()}


_UNITS: dict[str, dict[str, float]] = {
    "bytes": _prefixed("B", _DECIMAL | _BINARY),
    "bandwidth": _prefixed("B/s", _DECIMAL | _BINARY),
    "seconds": _SECONDS,
    "flop_rate": _prefixed("FLOP/s", _DECIMAL),
}
_EXAMPLE = {
    "bytes": "64 GiB",
    "bandwidth": "392 GB/s",
    "seconds": "3 us",
    "flop_rate": "312 TFLOP/s",
}

_PLAIN = {"bytes": "GiB", "bandwidth": "GB/s", "seconds": "s", "flop_rate": "TFLOP/s"}  # if none said


def parse_quantity(text: str, dimension: str) -> float:
    """Parses `text` to SI units; `dimension` is bytes, bandwidth, seconds or flop_rate. UsageError names the value."""
    match, example = _QUANTITY.match(text), f'"{_EXAMPLE[dimension]}"'
    units = _UNITS[dimension]
    if match is None or match[2] not in units:
        said = f"{text!r} is not a quantity of {dimension}: expected a number and a unit"
        raise UsageError(said, f'"{text.strip()} {_PLAIN[dimension]}"' if _NUMBER.match(text) else example)
    value = float(match[1]) * units[match[2]]
    if value < 0 or not math.isfinite(value):
        raise UsageError(f"{text!r}: expected a finite quantity of {dimension}, not negative", example)
    return value


def _format(value: float, units: dict[str, float], digits: int) -> str:
    """The largest unit that leaves a number of at least 1, `digits` significant digits; `-11.7 us` as 11.7 us."""
    if value < 0:
        return f"-{_format(-value, units, digits)}"
    order = sorted(units.items(), key=lambda item: item[1])
    rounded = float(f"{value:.{digits}g}")
    fitting = [item for item in order if item[1] <= rounded] or [order[0]]
    unit, factor = fitting[-1]
    scaled = f"{value / factor:.{digits}g}"
    return f"{float(scaled):.12g} {unit}"


def parse_bytes(text: str) -> float:
    return parse_quantity(text, "bytes")


def parse_bandwidth(text: str) -> float:
    return parse_quantity(text, "bandwidth")


def parse_seconds(text: str) -> float:
    return parse_quantity(text, "seconds")


def parse_flop_rate(text: str) -> float:
    return parse_quantity(text, "flop_rate")


def format_bytes(value: float, digits: int = 4) -> str:
    """`68719476736.0` -> "64 GiB"."""
    return _format(value, {"B": 1.0} | _prefixed("B", _BINARY), digits)


def format_bandwidth(value: float, digits: int = 4) -> str:
    """Bytes/s: `3.92e11` -> "392 GB/s"."""
    return _format(value, {"B/s": 1.0} | _prefixed("B/s", {p: f for p, f in _DECIMAL.items() if p != "K"}), digits)


def format_seconds(value: float, digits: int = 4) -> str:
    """`3e-6` -> "3 us"."""
    return _format(value, {unit: _SECONDS[unit] for unit in ("s", "ms", "us", "ns")}, digits) if value else "0 s"


def signed_seconds(value: float, digits: int = 3) -> str:
    """A difference: "+3 us" or "-3 us"."""
    return ("-" if value < 0 else "+") + format_seconds(abs(value), digits)


def format_flop_rate(value: float, digits: int = 4) -> str:
    """FLOP/s: `3.12e14` -> "312 TFLOP/s"."""
    return _format(value, {u: f for u, f in _UNITS["flop_rate"].items() if not u.startswith("K")}, digits)


def counted(count: int, noun: str) -> str:
    """`1 micro-batch`, `2 micro-batches`: a noun whose plural takes s, or es after ch and ss."""
    ending = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count} {noun}{ending if count != 1 else ''}"
