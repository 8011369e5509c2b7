"""Values of a graph that may be infinite though all its inputs are finite, and those greater than 0.

A product with a partial sum is linear in it only if the other factor is finite, and a quotient only if the divisor is
not 0: for a part that is 0, 0 * inf and 0 / 0 make NaN where the whole has inf. Inputs, parameters and trained values
count as finite, and so do overflows; poles (1 / 0, log 0) and infinities that are written down do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autoshard.ir.graph import Attribute, Graph, Op
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.operators import OPERATORS, record


@dataclass(frozen=True)
class Signs:
    """Tensors that may hold infinities; and those with no number below 0, or with all above 0."""

    infinite: set[str] = field(default_factory=set)
    least: dict[str, int] = field(default_factory=dict)  # 1: all are above 0; 0: none is below

    def of(self, op: Op) -> tuple[frozenset[int], frozenset[int]]:
        """Operands of `op` that may hold infinities, and those that are above 0."""
        infinite = frozenset(i for i, name in enumerate(op.operands) if name in self.infinite)
        return infinite, frozenset(i for i, name in enumerate(op.operands) if self.is_positive(name))

    def is_positive(self, name: str | None) -> bool:
        return self.least.get(name or "") == 1


def signs(graph: Graph) -> Signs:
    """Signs of all values of the graph."""
    return graph.once(_signs)


def _signs(graph: Graph) -> Signs:
    signs = Signs()
    calls = [(path, call) for recipe in graph.recipes for path in recipe.paths for call in recipe.calls]
    written = {path for path, call in calls if _has_infinity((call.arguments, tuple(v for _, v in call.keywords)))}
    for stored in (*graph.parameters, *graph.buffers):
        if stored.path in written or _has_infinity(tuple(x for x in stored.init if not isinstance(x, str))):
            signs.infinite.add(stored.tensor)
    for op in graph.ops:
        least = _least(graph, signs, op)
        if least is not None:
            signs.least.update(dict.fromkeys(op.results[:1], least))
        floating = {name for name in op.results if "float" in graph.tensor(name).dtype}
        if _may_be_infinite(graph, signs, op):
            signs.infinite.update(floating)
    return signs


def _has_infinity(value: Attribute) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_infinity, value))
    return isinstance(value, float) and math.isinf(value)


def _may_be_infinite(graph: Graph, signs: Signs, op: Op) -> bool:
    bounded = op.target in _FINITE or record(op.target).work is Work.ATTENTION
    if bounded or (op.target == "aten.clamp" and {"min", "max"} <= _arguments(op).keys()):
        return False
    if not signs.infinite.isdisjoint(name for name in op.operands if name is not None):
        return True
    pole = _POLES.get(op.target)
    if pole is not None:
        return pole(signs, op)
    known = op.target in OPERATORS or op.target.startswith("autoshard.")
    bounds = {name: value for name, value in op.attributes if name not in _BOUNDS}
    return not known or _has_infinity(tuple(bounds.values()))


def _arguments(op: Op) -> dict[str, Attribute]:
    return {name: value for name, value in op.attributes if value is not None}


def _number(op: Op, name: str) -> float | None:
    value = dict(op.attributes).get(name)
    return float(value) if isinstance(value, int | float) else None


# --- poles ---

_Pole = Callable[[Signs, Op], bool]


def _at_zero(operand: int) -> _Pole:
    """Pole where this operand may be 0; a number in its place is known."""

    def pole(signs: Signs, op: Op) -> bool:
        if operand < len(op.operands):
            return not signs.is_positive(op.operands[operand])
        return not _number(op, "other")

    return pole


def _below_zero(signs: Signs, op: Op) -> bool:
    """Pole of log1p, at -1."""
    return op.operands[0] not in signs.least


def _power(signs: Signs, op: Op) -> bool:
    exponent, base = _number(op, "exponent"), _number(op, "self")
    if base is not None:
        return base <= 0
    return not (exponent is not None and exponent >= 0) and not signs.is_positive(op.operands[0])


def _always(_: Signs, op: Op) -> bool:
    return True


def _quotient(signs: Signs, op: Op) -> bool:
    return _at_zero(0 if "self" in _arguments(op) else 1)(signs, op)


_POLES: dict[str, _Pole] = {
    **{f"aten.{name}": _at_zero(0) for name in ("log", "log2", "log10", "reciprocal", "rsqrt")},
    **{f"aten.{name}": _quotient for name in ("div", "true_divide", "floor_divide")},
    "aten.log1p": _below_zero,
    "aten.pow": _power,
    **{
        f"aten.{name}": _always
        for name in (
            "addcdiv", "atanh", "digamma", "erfinv", "float_power", "lgamma", "logdet", "logit", "polygamma",
            "special_ndtri", "xlogy",
        )
    },
}  # fmt: skip
_BOUNDS = ("min", "max", "min_val", "max_val", "nan", "posinf", "neginf", "p", "ord")  # numbers that no result has
_FINITE = frozenset(
    f"aten.{name}"
    for name in (
        "softmax", "sigmoid", "tanh", "hardtanh", "hardsigmoid", "relu6", "sin", "cos", "atan", "erf", "sign",
        "nan_to_num",
    )
)  # fmt: skip


# --- signs ---


def _least(graph: Graph, signs: Signs, op: Op) -> int | None:
    """1 if all numbers of the first result are above 0, 0 if none is below."""
    dtype = graph.tensor(op.results[0]).dtype if op.results else ""
    if dtype == "bool":
        return 0
    leasts = [signs.least.get(name) for name in op.operands if name is not None]
    if op.target in _KEEPS or record(op.target).view is not None:
        least = leasts[0] if len(set(leasts)) == 1 else None
    else:
        rule = _RULES.get(op.target)
        least = None if rule is None or "self" in _arguments(op) else rule(leasts, op)
    # Small numbers are 0 in float16, and 1 / inf is.
    holds = dtype in _WIDE and signs.infinite.isdisjoint(name for name in op.operands if name is not None)
    return least if least is None or holds else 0


_WIDE = ("float64", "float32", "bfloat16")
_Least = Callable[[list[int | None], Op], int | None]


def _none_below(leasts: list[int | None], op: Op) -> int | None:
    """Returns 0, not 1: a number that is small enough becomes 0."""
    return 0


def _magnitude(leasts: list[int | None], op: Op) -> int | None:
    return 1 if leasts[0] == 1 else 0


def _sum(leasts: list[int | None], op: Op) -> int | None:
    terms = [*leasts, *_numbers(op)]
    return None if None in terms or dict(op.attributes).get("alpha", 1) != 1 else max(_known(terms))


def _product(leasts: list[int | None], op: Op) -> int | None:
    if op.target == "aten.mul" and len(op.operands) == 2 and op.operands[0] == op.operands[1]:
        return _magnitude(leasts, op)
    factors = [*leasts, *_numbers(op)]
    return None if None in factors or "rounding_mode" in _arguments(op) else min(_known(factors))


def _numbers(op: Op) -> list[int | None]:
    other = _number(op, "other")
    return [] if other is None else [_of(other)]


def _clamped(leasts: list[int | None], op: Op) -> int | None:
    low, high = _number(op, "min"), _number(op, "max")
    if (op.target == "aten.clamp" and len(leasts) > 1) or (high is not None and high <= 0):
        return None
    return max(_known([*leasts, None if low is None else _of(low)]), default=None)


def _even_power(leasts: list[int | None], op: Op) -> int | None:
    exponent = _number(op, "exponent")
    if exponent is None or leasts[0] is not None:
        return None if exponent is None else leasts[0]
    return 0 if exponent % 2 == 0 else None


def _filled(leasts: list[int | None], op: Op) -> int | None:
    number = 1.0 if op.target == "aten.ones" else _number(op, "fill_value")
    return None if number is None else _of(number)


def _of(number: float) -> int | None:
    return 1 if number > 0 else 0 if number == 0 else None


def _known(terms: Iterable[int | None]) -> list[int]:
    return [term for term in terms if term is not None]


def _each(names: str, rule: _Least) -> dict[str, _Least]:
    return {f"aten.{name}": rule for name in names.split()}


_KEEPS = frozenset(
    f"aten.{name}"
    for name in (
        "sqrt", "rsqrt", "reciprocal", "sum", "mean", "amax", "amin", "cumsum", "clone", "to", "_to_copy", "cat",
        "stack", "index_select", "gather",
    )
)  # fmt: skip
_RULES: dict[str, _Least] = {
    **_each("exp exp2 softmax softplus var std", _none_below),
    **_each("abs square relu relu6 sigmoid norm linalg_vector_norm", _magnitude),
    **_each("add", _sum),
    **_each("mul div", _product),
    **_each("clamp clamp_min maximum", _clamped),
    **_each("pow", _even_power),
    **_each("full ones", _filled),
}
