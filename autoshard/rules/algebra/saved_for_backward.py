"""Tensors that autograd keeps of an operator until its backward: the answers that several operators share."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.ir.graph import Op, Tensor

Operands = list[Tensor | None]
Kept = tuple[tuple[int, ...], tuple[int, ...], int]  # operand positions, result positions, extra bytes
Saves = Callable[[Op, Operands, list[Tensor]], Kept]


def floating(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Floating operands: assumed for an operator that states nothing."""
    return tuple(i for i, operand in enumerate(operands) if operand is not None and "float" in operand.dtype), (), 0


def keeps(*operands: int, results: tuple[int, ...] = ()) -> Saves:
    """Answer that always keeps these operands and results."""
    return lambda op, inputs, outputs: (operands, results, 0)


def product(left: int = 0, right: int = 1) -> Saves:
    """Answer that keeps each factor for the other's gradient."""

    def saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
        return tuple(i for i, j in ((left, right), (right, left)) if needs_grad(operands, j)), (), 0

    return saves


def needs_grad(operands: Operands, position: int) -> bool:
    operand = operands[position] if position < len(operands) else None
    return operand is not None and operand.requires_grad


def accumulator_bytes(operand: Tensor | None) -> int:
    """Bytes per element of a statistic: kernels compute it in float32 at least."""
    return 8 if operand is not None and operand.dtype == "float64" else 4


NOTHING = keeps()
FIRST = keeps(0)
RESULT = keeps(results=(0,))
FACTORS = product()
