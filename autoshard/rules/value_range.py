"""Ranges of whole numbers in a graph that its sizes and constants decide: positions, buckets.

Known at any length of the sequences, by what follows it. Both sides of a `where` are followed with its condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from autoshard.ir.graph import Attribute, Graph, Op, Parameter
from autoshard.rules.operators import record


class Range(NamedTuple):
    """[low, high]; low > high: no number. `external`: numbers of the caller are among them, too, whatever these are."""

    low: float
    high: float
    external: bool = False

    @property
    def empty(self) -> bool:
        return self.low > self.high


GIVEN = Range(math.inf, -math.inf, True)
FLAG = Range(0, 1)
Known = Range | None  # None: nothing tells
ROUNDING_ERROR = float(np.finfo(np.float32).resolution)  # relative, of some operations in single precision
_ROUNDED = ("float16", "bfloat16")  # which don't hold all positions
_ROUNDING: dict[object, Callable[[float], float]] = {None: float, "floor": math.floor, "trunc": math.trunc}


@dataclass(frozen=True)
class Lengthened:
    """`graph` with sequences that are `more` longer. `slopes`: place -> what a number there grows by for each unit.

    `known`: tensor -> its range; what a condition says is put there.
    """

    graph: Graph
    slopes: Mapping[str, Fraction]
    more: int = 0
    known: dict[str, Known] = field(default_factory=dict)

    def number(self, place: str, value: int) -> int:
        return int(value + self.slopes.get(place, 0) * self.more)

    def size(self, name: str, dim: int) -> int:
        shape = self.graph.tensor(name).shape
        return self.number(f"{name} {dim % len(shape)}", shape[dim])

    def argument(self, op: Op, name: str, default: float | None = None) -> float | None:
        """Number among the arguments; `default` if it is absent."""
        value = dict(op.attributes).get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return self.number(f"{op.name} {name}", value)
        return float(value) if isinstance(value, float | bool) else default

    def range(self, name: str | None) -> Known:
        """Range of the numbers of a tensor, None if unknown."""
        if name is None:
            return None
        if name not in self.known:
            self.known[name] = self._range(name)
        return self.known[name]

    def _range(self, name: str) -> Known:
        op = self.graph.producers.get(name)
        if op is None:
            return _of_input(self.graph, name) if name in self.graph.inputs else _of_stored(self.graph, name)
        if op.target in FUNCTIONS:
            span = FUNCTIONS[op.target](self, op)
        else:
            moved = op.operands if record(op.target).moves else ()
            span = _union(*(self.range(operand) for operand in moved if operand is not None))
        if self.graph.tensor(name).dtype in _ROUNDED:
            return None
        if self.graph.tensor(name).dtype == "bool":
            return FLAG if span is None or not FLAG.low <= span.low <= span.high <= FLAG.high else span
        return span

    def where(self, name: str, known: Range) -> Lengthened:
        """Same graph and length, with the numbers of `name` known to be in `known`."""
        return replace(self, known={name: known})


def _of_input(graph: Graph, name: str) -> Range:
    for entry in graph.input_ranges:
        if entry.tensor == name:
            return Range(entry.low, entry.high - ("int" in graph.tensor(name).dtype), True)
    for columns in graph.column_ranges:
        if columns.tensor == name:
            return Range(min(low for low, _ in columns.bounds), max(high for _, high in columns.bounds) - 1, True)
    return GIVEN


def _of_stored(graph: Graph, name: str) -> Known:
    stored = next((one for one in (*graph.buffers, *graph.parameters) if one.tensor == name), None)
    if stored is None or stored.trainable:
        return None
    if stored.init and stored.init[0] == "constant":
        return Range(float(stored.init[1]), float(stored.init[1]))
    return _of_recipe(graph, stored)


def _of_recipe(graph: Graph, stored: Parameter) -> Known:
    """Range of a buffer that is an arange or literal numbers, moved at most; else None."""
    calls = next((recipe.calls for recipe in graph.recipes if stored.path in recipe.paths), ())
    if not calls or any(call.target.split(".")[1] not in _MOVING for call in calls[1:]):
        return None
    target, arguments = calls[0].target, calls[0].arguments
    if target == "aten.arange.default" and isinstance(arguments[0], int):
        return Range(0, arguments[0] - 1)
    numbers = arguments[2] if target == "values" else None
    return _of_numbers(numbers) if isinstance(numbers, tuple) else None


def _of_numbers(values: Attribute) -> Known:
    numbers = [float(x) for x in values if isinstance(x, int | float)] if isinstance(values, tuple) else []
    return Range(min(numbers), max(numbers)) if numbers else None


def _union(*ranges: Known) -> Known:
    known = [one for one in ranges if one is not None]
    if not known or len(known) < len(ranges):
        return None
    return Range(min(r.low for r in known), max(r.high for r in known), any(r.external for r in known))


def _counted(at: Lengthened, op: Op) -> Known:
    start, step = at.argument(op, "start", 0), at.argument(op, "step", 1)
    if start is None or step is None or step <= 0:
        return None
    return Range(start, start + (at.size(op.results[0], 0) - 1) * step)


def _filled(value: float | None) -> Callable[[Lengthened, Op], Known]:
    def bounds(at: Lengthened, op: Op) -> Known:
        number = at.argument(op, "fill_value", value)
        return None if number is None else Range(number, number)

    return bounds


def _constant(at: Lengthened, op: Op) -> Known:
    values = dict(op.attributes).get("values")
    if not isinstance(values, tuple):
        return None
    places = (f"{op.name} values {i}" for i in range(len(values)))
    return _of_numbers(tuple(at.number(p, x) if isinstance(x, int) else x for p, x in zip(places, values, strict=True)))


def _operand(at: Lengthened, op: Op, index: int, argument: str = "other") -> Known:
    """Range of an operand; a number may stand in a tensor's place."""
    if index < len(op.operands) and op.operands[index] is not None:
        return at.range(op.operands[index])
    number = at.argument(op, argument)
    return None if number is None else Range(number, number)


def _corners(function: Callable[[float, float], float]) -> Callable[[Lengthened, Op], Known]:
    """Range of a function of two operands that is monotone in each: its ends are among its values at their ends."""

    def bounds(at: Lengthened, op: Op) -> Known:
        a, b = _operand(at, op, 0), _operand(at, op, 1)
        attributes = dict(op.attributes)
        if a is None or b is None or a.empty or b.empty or attributes.get("alpha", 1) != 1 or "self" in attributes:
            return None
        try:
            ends = [function(x, y) for x in a[:2] for y in b[:2]]
        except (ArithmeticError, ValueError):
            return None
        return None if any(map(math.isnan, ends)) else Range(min(ends), max(ends), a.external or b.external)

    return bounds


def _quotient(a: float, b: float) -> float:
    if b <= 0:  # on the way from one end to the other 0 may lie
        raise ZeroDivisionError
    return a / b


def _divided(at: Lengthened, op: Op) -> Known:
    whole = _ROUNDING[dict(op.attributes).get("rounding_mode")]
    return _corners(lambda a, b: whole(_quotient(a, b)))(at, op)


def _one(function: Callable[[float], float]) -> Callable[[Lengthened, Op], Known]:
    def bounds(at: Lengthened, op: Op) -> Known:
        span = _operand(at, op, 0)
        if span is None or span.empty:
            return span
        ends = sorted(map(function, span[:2]))
        return Range(ends[0], ends[1], span.external)

    return bounds


def _magnitude(at: Lengthened, op: Op) -> Known:
    span = _operand(at, op, 0)
    if span is None or span.empty or span.low >= 0:
        return span
    return Range(max(0, -span.high), max(-span.low, span.high), span.external)


def _logarithm(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _root(x: float) -> float:
    return math.sqrt(x) if x > 0 else 0.0


def _cast(at: Lengthened, op: Op) -> Known:
    span = _operand(at, op, 0)
    if span is None or span.empty or "int" not in at.graph.tensor(op.results[0]).dtype:
        return span
    slack = 0.0 if "int" in at.graph.tensor(str(op.operands[0])).dtype else ROUNDING_ERROR
    low, high = span.low - slack * max(1, abs(span.low)), span.high + slack * max(1, abs(span.high))
    return Range(_whole(low), _whole(high), span.external)


def _whole(x: float) -> float:
    return x if math.isinf(x) else math.trunc(x)


def _summed(at: Lengthened, op: Op) -> Known:
    """Range of a cumulative sum along a dim, of at most as many terms as the dim has."""
    span, dim = _operand(at, op, 0), dict(op.attributes).get("dim")
    if span is None or span.empty or not isinstance(dim, int):
        return None
    count = at.size(op.results[0], dim)
    return Range(min(span.low, span.low * count), max(span.high, span.high * count), span.external)


def _clamped(at: Lengthened, op: Op) -> Known:
    span = _operand(at, op, 0)
    low, high = at.argument(op, "min", -math.inf), at.argument(op, "max", math.inf)
    if span is None or low is None or high is None or len([x for x in op.operands if x is not None]) > 1:
        return None
    return span if span.empty else Range(min(max(span.low, low), high), min(max(span.high, low), high), span.external)


def _remainder(at: Lengthened, op: Op) -> Known:
    other = at.argument(op, "other")
    return Range(0, other - 1) if other is not None and other >= 1 and float(other).is_integer() else None


def _least(at: Lengthened, op: Op) -> Known:
    return _end(at, op, min)


def _most(at: Lengthened, op: Op) -> Known:
    return _end(at, op, max)


def _end(at: Lengthened, op: Op, of: Callable[[float, float], float]) -> Known:
    """Range of which one end is known, if only one of the two operands is."""
    a, b = (r or Range(-math.inf, math.inf) for r in (_operand(at, op, 0), _operand(at, op, 1)))
    if a.empty or b.empty:
        return None
    return Range(of(a.low, b.low), of(a.high, b.high), a.external or b.external)


def _chosen(at: Lengthened, op: Op) -> Known:
    """Range of `where(x < n, a, b)`: a of x below n, b of the others."""
    condition = at.graph.producers.get(str(op.operands[0]))
    below, above = at, at
    limit = at.argument(condition, "other") if condition is not None and condition.target == "aten.lt" else None
    if condition is not None and limit is not None and condition.operands[0] is not None:
        name, span = condition.operands[0], at.range(condition.operands[0])
        if span is not None and "int" in at.graph.tensor(name).dtype:
            limit = math.ceil(limit)
            below = at.where(name, Range(span.low, min(span.high, limit - 1), span.external))
            above = at.where(name, Range(max(span.low, limit), span.high, span.external))
    sides = [_operand(side, op, i, word) for side, i, word in ((below, 1, "self"), (above, 2, "other"))]
    said = [span for side, span in zip((below, above), sides, strict=True) if not _never(side)]
    return _union(*said)


def _never(side: Lengthened) -> bool:
    return any(span is not None and span.empty and not span.external for span in side.known.values())


def _replaced(at: Lengthened, op: Op) -> Known:
    return _union(_operand(at, op, 0), _operand(at, op, 2 if op.target == "aten.masked_fill" else 1, "value"))


def _padded(at: Lengthened, op: Op) -> Known:
    if dict(op.attributes).get("mode", "constant") != "constant":
        return _operand(at, op, 0)
    value = at.argument(op, "value", 0)
    return None if value is None else _union(_operand(at, op, 0), Range(value, value))


def _both(at: Lengthened, op: Op) -> Known:
    return _union(_operand(at, op, 0), _operand(at, op, 1))


def _ranked(at: Lengthened, op: Op) -> Known:
    """Range of indices along a dim."""
    dim, source = dict(op.attributes).get("dim", -1), op.operands[0]
    return Range(0, at.size(source, dim) - 1) if isinstance(dim, int) and source is not None else None


def _repeated(at: Lengthened, op: Op) -> Known:
    return _operand(at, op, 0)


_MOVING = ("expand", "view", "unsqueeze", "squeeze", "clone", "detach", "alias", "_to_copy", "reshape", "slice", "to")
FUNCTIONS: dict[str, Callable[[Lengthened, Op], Known]] = {
    "aten.arange": _counted,
    "autoshard.constant": _constant,
    **{f"aten.{name}": _filled(None) for name in ("full", "new_full")},
    **{f"aten.{name}": _filled(0) for name in ("zeros", "new_zeros")},
    **{f"aten.{name}": _filled(1) for name in ("ones", "new_ones")},
    "aten.add": _corners(lambda a, b: a + b),
    "aten.sub": _corners(lambda a, b: a - b),
    "aten.rsub": _corners(lambda a, b: b - a),
    "aten.mul": _corners(lambda a, b: a * b),
    "aten.div": _divided,
    "aten.floor_divide": _corners(lambda a, b: math.floor(_quotient(a, b))),
    "aten.remainder": _remainder,
    "aten.minimum": _least,
    "aten.maximum": _most,
    "aten.neg": _one(lambda x: -x),
    "aten.log": _one(_logarithm),
    "aten.sqrt": _one(_root),
    "aten.abs": _magnitude,
    **{f"aten.{name}": _clamped for name in ("clamp", "clamp_min", "clamp_max")},
    "aten.to": _cast,
    "aten._to_copy": _cast,
    "aten.cumsum": _summed,
    **{f"aten.{name}": _padded for name in ("constant_pad_nd", "pad")},
    "aten.where": _chosen,
    "aten.masked_fill": _replaced,
    "aten.fill": _replaced,
    **{f"aten.{name}": _both for name in ("slice_scatter", "select_scatter")},
    **{f"aten.{name}": _repeated for name in ("repeat", "gather", "index_select", "index")},
    **{f"aten.{name}": _ranked for name in ("argmax", "argmin", "argsort")},
}
