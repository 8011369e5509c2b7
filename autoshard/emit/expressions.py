"""Operators as expressions: by the spelling of the operator's record, where that says all that the op says.

Otherwise from its schema, by which any operator can be written. In a template `{0}` is an operand, `{name}` an
attribute, `{a|2}` attribute a or else operand 2, `{*}` all operands, `{*name}` the items of a tuple, `{device}` the
device. `<name=x>` is a keyword argument, left out where it is absent, None or x; `<@name=x>` the same as a positional
one; `<2>` and `<name:2>` an operand, left out where it is absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from autoshard.code_text import quoted
from autoshard.ir.graph import DTYPE_BYTES
from autoshard.ir.layout import LocalSize
from autoshard.ir.program import LocalAttribute
from autoshard.ir.schemas import PLACEMENT, Schema, bind, fitting, parse
from autoshard.ir.schemas import Operands as Taken
from autoshard.replay.other_sizes import SizeNumber
from autoshard.rules.operators import record

Operands = Sequence[str | None]
Attributes = Mapping[str, LocalAttribute]

DTYPES = frozenset(DTYPE_BYTES) | {"complex64", "complex128"}
IGNORED = PLACEMENT | {"implicit"}
REDUCTIONS = ("none", "mean", "sum")  # torch's numbers for them
_PIECES = re.compile(r"([^<{]+)|<([^>]*)>|\{([^}]*)\}")  # of a template: text, <optional>, {field}


@dataclass(frozen=True)
class ExpressionWriter:
    """`size` writes an uneven local size, `device` names the device, `schemas` are those of the program, `follow`
    writes a size that follows one of the inputs."""

    size: Callable[[LocalSize], str]
    device: str
    schemas: tuple[str, ...] = ()
    follow: Callable[[SizeNumber], str] = str

    def spell(self, target: str, operands: Operands, attributes: Attributes) -> str:
        """Expression of an operator. Operands are names or calls, or None where an optional one is absent."""
        relevant = {key: value for key, value in attributes.items() if key not in IGNORED}
        schema = self.schema(target, operands, attributes)
        known = record(target)
        template = known.spelling if isinstance(known.spelling, str) else ""
        text = known.spelling(self, operands, relevant) if callable(known.spelling) else None
        if text is None and known.infix:
            text = self._infix(known.infix, operands, relevant)
        if text is None and template and _says_all(template, operands, relevant, schema):
            text = self._fill(template, operands, relevant)
        if text is None and schema is not None:
            text = self._by_schema(schema, operands, relevant)
        return text if text is not None else self._generic(target, operands, relevant)

    def schema(self, target: str, operands: Operands, attributes: Attributes) -> Schema | None:
        """Schema of the overload that is called; None for what is no operator of torch, or a graph without schemas."""
        overloads = _by_target(self.schemas).get(target, ())
        return fitting(overloads, operands, {key: _plain(value) for key, value in attributes.items()})

    def assigned(self, target: str, operands: Operands, attributes: Attributes, names: Sequence[str]) -> str:
        """Text left of the `=`, for results of these names (`_`: not used)."""
        known = record(target)
        if known.statistics and len(names) > 1:
            return ", ".join([names[0], "_", "_", *names[1:]])  # torch hands out those of the batch before the new ones
        schema = self.schema(target, operands, attributes)
        listed = schema.returns_list if schema else known.returns_list
        return f"({names[0]},)" if listed and len(names) == 1 else ", ".join(names)

    def literal(self, value: LocalAttribute) -> str:
        if isinstance(value, LocalSize):
            return self.size(value)
        if isinstance(value, SizeNumber):
            return self.follow(value)
        if isinstance(value, tuple):
            items = [self.literal(item) for item in value]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        if isinstance(value, str):
            return f"torch.{value}" if value in DTYPES else quoted(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return repr(value)

    def _infix(self, symbol: str, operands: Operands, attributes: Attributes) -> str | None:
        """Expression with the operator's symbol; None if it has an option that the symbol can't express."""
        if attributes.get("alpha", 1) != 1 or attributes.get("rounding_mode") is not None:
            return None
        sides = [operand for operand in operands if operand is not None]
        if "self" in attributes:
            sides.insert(0, self._side(attributes["self"]))
        sides += [self._side(attributes[name]) for name in ("other", "exponent") if name in attributes]
        if len(sides) != 2:
            return None
        left, right = sides
        left = f"({left})" if left.startswith("-") else left
        return f"{left}**{right}" if symbol == "**" else f"{left} {symbol} {right}"

    def _side(self, value: LocalAttribute) -> str:
        text = self.literal(value)
        return f"({text})" if isinstance(value, SizeNumber) and " " in text else text

    def _fill(self, template: str, operands: Operands, attributes: Attributes) -> str | None:
        """Template filled in; None where something that it needs is absent."""
        text = ""
        for plain, optional, field in _PIECES.findall(template):
            piece = plain or (self._optional(optional, operands, attributes) if optional else None)
            piece = self._field(field, operands, attributes) if piece is None else piece
            if piece is None:
                return None
            text += piece.removeprefix(", ") if text.endswith("(") else piece
        return text

    def _optional(self, argument: str, operands: Operands, attributes: Attributes) -> str:
        """`, value` or `, name=value`, "" where it is absent or the default."""
        head, _, default = argument.partition("=")
        name, _, position = head.partition(":")
        field = position or name.removeprefix("@")
        text = self._field(field, operands, attributes)
        if text is None or text in _spellings(default):
            return ""
        return f", {text}" if name.startswith("@") or name.isdecimal() else f", {name}={text}"

    def _field(self, field: str, operands: Operands, attributes: Attributes) -> str | None:
        """Text that `field` stands for, None where it is absent."""
        if field == "*":
            return ", ".join(str(operand) for operand in operands)
        if field == "device":
            return self.device
        for name in field.split("|"):
            if name.isdecimal():
                if int(name) < len(operands):
                    return operands[int(name)]
            elif (value := attributes.get(name.removeprefix("*"))) is not None:
                return self._attribute(name, value)
        return None

    def _attribute(self, name: str, value: LocalAttribute) -> str:
        if name == "reduction" and isinstance(value, int):
            return f'"{REDUCTIONS[value]}"'
        if name.startswith("*") and isinstance(value, tuple):
            return ", ".join(map(self.literal, value)) or "()"
        return self.literal(value)

    def _by_schema(self, schema: Schema, operands: Operands, attributes: Attributes) -> str | None:
        """Call with arguments by position as far as none is left out, then by keyword; defaults are left out."""
        bound = bind(schema, operands, {key: _plain(value) for key, value in attributes.items()})
        if bound is None:
            return None
        arguments: list[str] = []
        by_keyword = False
        for argument in schema.arguments:
            value = bound.get(argument.name)
            if isinstance(value, Taken):
                joined = ", ".join(str(operands[i]) for i in value.positions)
                text = f"[{joined}]" if value.is_list else joined
            elif argument.name in attributes and (argument.required or attributes[argument.name] != argument.default):
                text = self.literal(attributes[argument.name])
            elif argument.name == "device" and not any(operands):
                text = self.device
            elif argument.required:
                text = "None" if argument.optional else "True"  # a switch of torch's own
            else:
                by_keyword = True
                continue
            by_keyword |= argument.keyword
            arguments.append(f"{argument.name}={text}" if by_keyword else text)
        return f"{_callee(schema)}({', '.join(arguments)})"

    def _generic(self, target: str, operands: Operands, attributes: Attributes) -> str:
        """Call without a schema: the operator's own name, tensors in order, everything else by keyword."""
        namespace, _, name = target.partition(".")
        arguments = [self.literal(attributes["self"])] if "self" in attributes else []
        arguments += [str(operand) for operand in operands]
        arguments += [f"{key}={self.literal(value)}" for key, value in attributes.items() if key != "self"]
        if record(target).takes_device:
            arguments.append(f"device={self.device}")
        return f"torch.ops.{namespace}.{name}({', '.join(arguments)})"


def _callee(schema: Schema) -> str:
    """`torch.hstack`, `torch.ops.aten.index_fill.int_Scalar`, `torch.ops.mine.op`."""
    namespace, _, name = schema.target.partition(".")
    if record(schema.target).in_torch:
        return f"torch.{name}"
    overload = schema.overload or ("default" if namespace == "aten" else "")
    return f"torch.ops.{namespace}.{name}" + (f".{overload}" if overload else "")


@cache
def _by_target(schemas: tuple[str, ...]) -> dict[str, tuple[Schema, ...]]:
    by_target: dict[str, list[Schema]] = {}
    for schema in map(parse, schemas):
        by_target.setdefault(schema.target, []).append(schema)
    return {target: tuple(overloads) for target, overloads in by_target.items()}


def _plain(value: LocalAttribute) -> LocalAttribute:
    """Attribute with an integer for each local size: enough to know the kind of an argument."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.size if isinstance(value, LocalSize) else value


@cache
def _mentions(template: str) -> tuple[frozenset[str], frozenset[int], bool]:
    """The attributes that a template writes, the operands, and whether it writes all of them."""
    words = [
        word
        for field in re.findall(r"[<{]([^>}]*)[>}]", template)
        for word in re.split("[|:]", field.partition("=")[0])
    ]
    names = frozenset(word.lstrip("@*") for word in words)
    return names, frozenset(int(name) for name in names if name.isdecimal()), "{*}" in template


def _says_all(template: str, operands: Operands, attributes: Attributes, schema: Schema | None) -> bool:
    """True if it writes every operand, and every attribute that is not the default. (Unknown without a schema.)"""
    names, positions, everything = _mentions(template)
    if not everything and any(o is not None and i not in positions for i, o in enumerate(operands)):
        return False
    defaults = schema.defaults if schema else {}
    return all(
        name in names or schema is None or value == defaults.get(name, _REQUIRED) for name, value in attributes.items()
    )


_REQUIRED = object()


def _spellings(default: str) -> set[str]:
    """A default as it may be written: 1, 1.0, "1", (1,), (1, 1), ..."""
    plain = default.replace("'", '"')
    repeated = {f"({', '.join([default] * count)})" for count in (2, 3)}
    return {plain, f"{default}.0", f"({default},)", *repeated} if default else set()
