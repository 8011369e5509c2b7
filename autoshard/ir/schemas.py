"""Operators' schemas as torch prints them, and which operand or attribute of an op is which argument.

Read without torch, so that a saved graph says all that is needed to write its calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

# Arguments that a graph does not hold: where a result lies in memory, and switches of torch's own.
PLACEMENT = frozenset({
    "device", "layout", "pin_memory", "memory_format", "non_blocking", "generator", "cudnn_enable", "cudnn_enabled",
})  # fmt: skip
_NUMBERS = ("int", "SymInt")
_TAKES: dict[str, tuple[type, ...]] = {
    "int": (int,), "SymInt": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "ScalarType": (str, int),
    "Scalar": (int, float, bool),
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """`kind` is its type without `?`, `[]` and aliases; `default` its value, where it is not `required`."""

    name: str
    kind: str
    is_list: bool
    optional: bool
    keyword: bool
    required: bool
    default: Any = None

    @property
    def is_tensor(self) -> bool:
        return self.kind == "Tensor"

    def takes(self, value: Any) -> bool:
        """Can an attribute have this value here? A number in place of a tensor can; one for a list is its length."""
        if self.is_tensor:
            return isinstance(value, int | float)
        if value is None:
            return self.optional
        if self.is_list:
            if isinstance(value, tuple):
                return all(_is_one(self.kind, item) for item in value)
            return self.kind in _NUMBERS and isinstance(value, int)
        return _is_one(self.kind, value)


@dataclass(frozen=True)
class Operands:
    """The operands, by position, that an argument takes: one, or a list of them."""

    positions: tuple[int, ...]
    is_list: bool


@dataclass(frozen=True)
class Schema:
    """One overload: `target` is `aten.index_fill`; `results` are types (`Tensor`, `Tensor[]`)."""

    target: str
    overload: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]

    @property
    def returns_list(self) -> bool:
        return self.results == ("Tensor[]",)

    @property
    def defaults(self) -> dict[str, Any]:
        return {argument.name: argument.default for argument in self.arguments if not argument.required}


@cache
def parse(text: str) -> Schema:
    """A schema as `str(overload._schema)` prints it; ValueError where it is none."""
    match = re.fullmatch(r"(\w+)::(\w+)(?:\.(\w+))?\((.*)\) -> (.*)", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{text!r} is no schema of an operator")
    namespace, name, overload, inside, results = match.groups()
    arguments: list[Argument] = []
    keyword = False
    for part in _split(inside):
        if part == "*":
            keyword = True
        elif part != "...":
            arguments.append(_argument(part, keyword))
    listed = _split(results[1:-1]) if results.startswith("(") else [results]
    returned = tuple(_plain(result).partition(" ")[0] for result in listed)
    return Schema(f"{namespace}.{name}", overload or "", tuple(arguments), returned)


def bind(schema: Schema, operands: Sequence[object], attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Argument name -> `Operands` or an attribute's value, what is left out apart; None where the schema doesn't fit.

    `operands` are tensors (or their names) in schema order, lists flattened, None where an optional one is absent.
    Where there are several lists, all but the last have their length as an attribute.
    """
    arguments = {argument.name: argument for argument in schema.arguments}
    if any(name not in arguments or not arguments[name].takes(value) for name, value in attributes.items()):
        return None
    result: dict[str, Any] = {}
    slots = [a for a in schema.arguments if a.is_tensor and (a.is_list or a.name not in attributes)]
    for argument in schema.arguments:
        if argument in slots:
            continue
        if argument.name in attributes:
            result[argument.name] = attributes[argument.name]
        elif argument.required and not (argument.name in PLACEMENT and argument.kind == "bool"):
            return None
    placed = _place(slots, operands, attributes)
    return None if placed is None else result | placed


def _place(
    slots: Sequence[Argument], operands: Sequence[object], attributes: Mapping[str, Any]
) -> dict[str, Operands | None] | None:
    """Which operands each tensor argument takes."""
    unsized = [slot for slot in slots if slot.is_list and slot.name not in attributes]
    singles = sum(not slot.is_list for slot in slots)
    sized = sum(attributes[slot.name] for slot in slots if slot.is_list and slot.name in attributes)
    remaining = max(0, len(operands) - singles - sized)
    if len(unsized) > 1:
        return None
    if unsized and slots[-1] is unsized[0] and len(operands) < singles + sized:
        return None
    result: dict[str, Operands | None] = {}
    position = 0
    for slot in slots:
        count = attributes.get(slot.name, remaining) if slot.is_list else 1
        indices = tuple(range(position, min(position + count, len(operands))))
        position += count
        present = any(operands[i] is not None for i in indices)
        if present or (slot.is_list and not slot.optional):
            result[slot.name] = Operands(indices, slot.is_list)
        elif slot.required:
            if not slot.optional:
                return None
            result[slot.name] = None
    return result if position >= len(operands) else None


def fitting(schemas: Sequence[Schema], operands: Sequence[object], attributes: Mapping[str, Any]) -> Schema | None:
    """The overload that leaves out the fewest arguments, and has tensors where the op has; None where none fits."""
    pairs = [(schema, bound) for schema in schemas if (bound := bind(schema, operands, attributes)) is not None]
    return min(pairs, key=lambda pair: _strain(*pair))[0] if pairs else None


def _strain(schema: Schema, bound: Mapping[str, Any]) -> tuple[int, int]:
    numbers = sum(a.is_tensor and isinstance(bound.get(a.name), int | float) for a in schema.arguments)
    left_out = sum(not a.is_tensor and a.name not in bound and a.name not in PLACEMENT for a in schema.arguments)
    return numbers, left_out


def _is_one(kind: str, value: Any) -> bool:
    return isinstance(value, _TAKES.get(kind, ()))


def _plain(text: str) -> str:
    """Without aliases: `Tensor(a -> *)[] x` is `Tensor[] x`."""
    return re.sub(r"\([^()]*\)", "", text).strip()


def _argument(text: str, keyword: bool) -> Argument:
    left, equals, default = text.partition("=")
    base = re.match(r"\w+", left)
    if base is None:
        raise ValueError(f"{text!r} is no argument of a schema")
    words = _plain(left).split()
    kind, name = words[0], words[-1]
    optional, is_list = kind.endswith("?"), "[" in kind
    return Argument(name, base[0], is_list, optional, keyword, not equals, _literal(default) if equals else None)


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value


def _split(text: str) -> list[str]:
    """The parts between commas outside brackets and quotes."""
    parts, depth, quoted, start = [], 0, False, 0
    for i, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in (*parts, text[start:].strip()) if part]
