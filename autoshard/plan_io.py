"""Plans as versioned JSON: the same plan is the same text, byte for byte, one decision a line for readable diffs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

from autoshard.errors import InvalidFileError, UsageError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.plan import SCHEMA_VERSION, Plan

KIND = "autoshard.plan"


def dumps(plan: Plan) -> str:
    """The plan as JSON text that ends with a newline."""
    lines = [f'"kind": "{KIND}"', f'"schema_version": {SCHEMA_VERSION}']
    for field in dataclasses.fields(plan):
        lines.append(f"{_text(field.name)}: {_block(_encode(getattr(plan, field.name)))}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def loads(text: str, where: str = "plan") -> Plan:
    """The plan written by `dumps`. InvalidFileError names the file (`where`) and the key that is wrong."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InvalidFileError(f"{where} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InvalidFileError(
            f"{where} is not an autoshard plan", "autoshard plan MODEL --mesh dp=2,tp=2 --hardware NAME"
        )
    if data.get("schema_version") != SCHEMA_VERSION:
        found = data.get("schema_version")
        raise InvalidFileError(
            f"{where} is a plan of schema version {found!r}, this autoshard reads version {SCHEMA_VERSION}",
            "make the plan again with `autoshard plan`",
        )
    body = {key: value for key, value in data.items() if key not in ("kind", "schema_version")}
    try:
        plan: Plan = _decode(Plan, body, "plan")
    except (ValueError, UsageError) as error:
        raise InvalidFileError(f"{where} is damaged: {error}") from None
    return plan


def save(plan: Plan, path: str | Path) -> None:
    """Write `path` whole or not at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(dumps(plan), encoding="utf-8")
    partial.replace(path)


def load(path: str | Path) -> Plan:
    """Read a plan file; InvalidFileError if it is missing, damaged, or of another kind or version."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InvalidFileError(f"can't read the plan {path}: {reason}") from None
    return loads(text, str(path))


def plan_hash(plan: Plan) -> str:
    """Sixteen hex digits that change with any decision, prediction or input of the plan."""
    return hashlib.sha256(dumps(plan).encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _block(value: Any) -> str:
    """JSON text; a list of records takes one line a record."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(_text(item) for item in value) + "\n ]"
    return _text(value)


def _encode(value: Any) -> Any:
    if isinstance(value, Layout | Mesh):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # "inf": JSON has no infinity
    return value


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value` (from JSON) as the type `kind`; ValueError names the place and what was expected there."""
    if kind is Layout or kind is Mesh:
        return kind.parse(_checked(str, value, where))
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, value, where)
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, where)
    if origin in (typing.Union, types.UnionType):
        return _checked(typing.get_args(kind), value, where)
    if kind is float:
        finite = not isinstance(value, str)
        return float(_checked((int, float), value, where)) if finite else _infinity(value, where)
    return _checked(kind, value, where)


def _decode_record(kind: Any, value: Any, where: str) -> Any:
    fields = typing.get_type_hints(kind)
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {type(value).__name__}, expected an object")
    missing, unknown = fields.keys() - value.keys(), value.keys() - fields.keys()
    if missing or unknown:
        problem = f"lacks {sorted(missing)[0]!r}" if missing else f"has an unknown key {sorted(unknown)[0]!r}"
        raise ValueError(f"{where} {problem}")
    return kind(**{name: _decode(hint, value[name], f"{where}.{name}") for name, hint in fields.items()})


def _decode_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {type(value).__name__}, expected a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_decode(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(kinds) != len(value):
        raise ValueError(f"{where} has {len(value)} entries, expected {len(kinds)}")
    return tuple(_decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _checked(kind: Any, value: Any, where: str) -> Any:
    allowed = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in allowed:
        names = " or ".join(k.__name__ for k in allowed)
        raise ValueError(f"{where} is {type(value).__name__}, expected {names}")
    return value


def _infinity(value: str, where: str) -> float:
    if value not in ("inf", "-inf"):
        raise ValueError(f"{where} is {value!r}, expected a number")
    return float(value)
