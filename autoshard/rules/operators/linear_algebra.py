"""Products of matrices. Weights: `aten.linear` holds (out, in), `autoshard.linear_in_out` (in, out)."""

from __future__ import annotations

from autoshard.rules.algebra.argument_rules import Localise, LocaliseVariant, NoRule, OperatorCall, RuleFor


def matmul(call: OperatorCall) -> str:
    left, right = (len(shape) for shape in call.shapes[:2] if shape is not None)
    first = "k" if left == 1 else "m k" if left == 2 else "... m k"
    second = "k" if right == 1 else "k n" if right == 2 else "... k n"
    batch = "... " if max(left, right) > 2 else ""
    result = f"{batch}{'m ' * (left > 1)}{'n' * (right > 1)}".strip() or "()"
    return f"{first}, {second} -> {result} | sum: k"


def addmm(call: OperatorCall) -> str:
    return f"{_added(call, 'm', 'n')}, m k, k n -> m n | sum: k"


def baddbmm(call: OperatorCall) -> str:
    return f"{_added(call, 'b', 'm', 'n')}, b m k, b k n -> b m n | sum: k"


def _added(call: OperatorCall, *names: str) -> str:
    """The added operand broadcasts to the result: its dims of size 1 are literal."""
    own = names[len(names) - call.rank :]
    return "+" + (" ".join("1" if size == 1 else name for size, name in zip(call.shape, own, strict=True)) or "()")


def einsum(call: OperatorCall) -> str:
    """`bij,bjk->bik` is already a rule; diagonals and `...` are not offered."""
    equation = str(call.get("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        raise NoRule
    summed = sorted(set(left) - set(right) - {","})
    operands = ", ".join(" ".join(part) or "()" for part in left.split(","))
    return f"{operands} -> {' '.join(right) or '()'}" + (f" | sum: {' '.join(summed)}" if summed else "")


RULES: dict[str, str | RuleFor] = {
    "aten.addmm": addmm,
    "aten.baddbmm": baddbmm,
    "aten.bmm": "b m k, b k n -> b m n | sum: k",
    "aten.dot": "k, k -> () | sum: k",
    "aten.einsum": einsum,
    "aten.linear": "... m, n m, +n? -> ... n | sum: m",
    "aten.matmul": matmul,
    "aten.mm": "m k, k n -> m n | sum: k",
    "aten.mv": "m k, k -> m | sum: k",
    "autoshard.linear_in_out": "... m, m n, +n? -> ... n | sum: m",
}
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {}
