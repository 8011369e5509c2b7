"""Frozen dataclasses to and from plain JSON values, checked against their own type hints.

A type with a `parse` (a layout, a mesh) is written as its own notation.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from functools import cache
from typing import Any

from autoshard.errors import UsageError
from autoshard.ir.graph import Attribute


def encode(value: Any) -> Any:
    """A record, tuple or scalar as JSON values; an infinite or undefined float is {"float": "inf"}."""
    kind = type(value)
    if kind is str or kind is int or value is None:
        return value
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if hasattr(kind, "parse"):
        return str(value)
    if dataclasses.is_dataclass(kind):
        return {name: encode(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def decode(kind: Any, value: Any, where: str) -> Any:
    """`value` (from JSON) as the type `kind`; ValueError names the place and what was expected there."""
    if hasattr(kind, "parse"):
        return _parsed(kind, value, where)
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    if typing.get_origin(kind) is tuple:
        return _tuple(typing.get_args(kind), value, where)
    if kind is float:
        return _float(value, where)
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if bool in options and float in options:
        return _attribute(value, where)
    if float in options and not isinstance(value, str):
        return _float(value, where)
    if type(value) not in options:
        raise ValueError(f"{where} is {_name(value)}, expected {' or '.join(option.__name__ for option in options)}")
    return _text(value, where) if isinstance(value, str) else value


def _text(value: str, where: str) -> str:
    """Text that a file can hold. ValueError for any other: JSON may escape halves of characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} is {value!r}, which is no text") from None
    return value


def _parsed(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {_name(value)}, expected str")
    try:
        return kind.parse(value)
    except (ValueError, UsageError) as error:
        raise ValueError(f"{where}: {error}") from None


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _record(kind: Any, value: Any, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_name(value)}, expected an object")
    for name in sorted(hints.keys() ^ value.keys()):
        raise ValueError(f"{where} lacks {name!r}" if name in hints else f"{where} has an unknown key {name!r}")
    return kind(**{name: decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {_name(value)}, expected a list")
    if kinds[1:] == (Ellipsis,):
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise ValueError(f"{where} has {len(value)} entries, expected {len(kinds)}")
    return tuple(decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _attribute(value: Any, where: str) -> Attribute:
    if isinstance(value, list):
        return tuple(_attribute(item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, dict):
        return _float(value, where)
    if isinstance(value, str):
        return _text(value, where)
    if value is None or type(value) in (int, float, bool):
        return typing.cast(Attribute, value)
    raise ValueError(f"{where} is {_name(value)}, expected an attribute")


def _float(value: Any, where: str) -> float:
    if type(value) in (int, float):
        return float(value)
    if isinstance(value, dict) and list(value) == ["float"] and value["float"] in ("inf", "-inf", "nan"):
        return float(value["float"])
    raise ValueError(f"{where} is {_name(value)}, expected a number")


def _name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
