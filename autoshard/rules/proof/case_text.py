"""The words that proof cases are written in."""

from __future__ import annotations

from autoshard.ir.graph import Attribute
from autoshard.rules.proof.rule_proof import OpCase, Operand

Shape = tuple[int, ...]


def floats(*shapes: Shape | None) -> tuple[Operand | None, ...]:
    return tuple(None if shape is None else Operand(shape) for shape in shapes)


def positive(*shapes: Shape) -> tuple[Operand | None, ...]:
    return tuple(Operand(shape, positive=True) for shape in shapes)


def constants(*shapes: Shape) -> tuple[Operand | None, ...]:
    """Positive operands without a gradient: running statistics."""
    return tuple(Operand(shape, gradient=False, positive=True) for shape in shapes)


def integers(shape: Shape, high: int, low: int = 0) -> Operand:
    return Operand(shape, "int64", low, high)


def booleans(shape: Shape) -> Operand:
    return Operand(shape, "bool")


def case(target: str, operands: tuple[Operand | None, ...], **attributes: Attribute) -> OpCase:
    return OpCase(target, operands, tuple(attributes.items()))


def case_id(one: OpCase) -> str:
    shapes = ",".join("-" if o is None else "x".join(map(str, o.shape)) or "()" for o in one.operands)
    return f"{one.target}[{shapes}]"
