"""Formulas for what a model spells out in several operators and torch has one for: GELU, SiLU, RMS norm.

A formula is Python text. A small letter or word stands for a value, the same one each time; `eps` stands for a number;
numbers are equal to the last bits, so that the one operator computes what the several did. Factors and terms stand in
any order. `mean` is over the last dims, which stay with length 1.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations

from autoshard.graph_capture.passes.rewrite import MARK, rewrite
from autoshard.ir.graph import Attribute, Graph, Op, Saved
from autoshard.units import EXACT

Made = Callable[["Match", Op, Graph], Op | None]


@dataclass(frozen=True)
class Match:
    """Match of a formula: what its words stand for, and the ops that it covers."""

    values: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    ops: frozenset[str] = frozenset()

    def with_value(self, word: str, value: str) -> Match | None:
        known = self.values.get(word, value)
        return replace(self, values={**self.values, word: value}) if known == value else None

    def with_number(self, word: str, number: float) -> Match | None:
        known = self.numbers.get(word, number)
        return replace(self, numbers={**self.numbers, word: number}) if known == number else None

    def over(self, *ops: Op) -> Match:
        return replace(self, ops=self.ops | {op.name for op in ops})


def _activation(target: str, **attributes: Attribute) -> Made:
    def replacement(match: Match, op: Op, graph: Graph) -> Op | None:
        x = graph.tensor(match.values["x"])
        same = (x.shape, x.dtype) == (graph.tensor(op.results[0]).shape, graph.tensor(op.results[0]).dtype)
        return _replaced(op, target, (x.name,), tuple(attributes.items())) if same and "float" in x.dtype else None

    return replacement


def _rms_norm(match: Match, op: Op, graph: Graph) -> Op | None:
    x, result, weight = graph.tensor(match.values["x"]), graph.tensor(op.results[0]), match.values.get("weight")
    dims = int(match.numbers["dims"])
    shape = x.shape[len(x.shape) - dims :]
    fits = (x.shape, x.dtype) == (result.shape, result.dtype)
    if weight is not None:
        fits = fits and (graph.tensor(weight).shape, graph.tensor(weight).dtype) == (shape, x.dtype)
    attributes: tuple[tuple[str, Attribute], ...] = (("normalized_shape", shape), ("eps", match.numbers["eps"]))
    return _replaced(op, "aten.rms_norm", (x.name, weight), attributes) if fits else None


def _replaced(
    op: Op, target: str, operands: tuple[str | None, ...], attributes: tuple[tuple[str, Attribute], ...]
) -> Op:
    return replace(op, target=target, operands=operands, attributes=attributes, saved=Saved())


_TANH = "x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x**3)))"
FORMULAS: tuple[tuple[str, Made], ...] = (
    (f"0.5 * {_TANH}", _activation("aten.gelu", approximate="tanh")),
    ("0.5 * x * (1 + tanh(x * 0.7978845608028654 * (1 + 0.044715 * x * x)))",
     _activation("aten.gelu", approximate="tanh")),
    ("0.5 * x * (1 + erf(0.7071067811865476 * x))", _activation("aten.gelu", approximate="none")),
    ("x * sigmoid(x)", _activation("aten.silu")),
    *((text, _rms_norm) for norm in ("x * rsqrt(mean(x**2) + eps)", "x / sqrt(mean(x**2) + eps)")
      for text in (f"weight * ({norm})", norm)),
)  # fmt: skip
_PARSED = tuple((ast.parse(text, mode="eval").body, make) for text, make in FORMULAS)


def fold_formulas(graph: Graph) -> Graph:
    """Every formula whose inner values nothing else reads; what it was made of goes dead."""
    ends = {*graph.outputs, *(value for _, value in graph.buffer_updates)}
    search = _Search(graph, frozenset(ends))
    covered: set[str] = set()
    ops: list[Op] = []
    for op in reversed(graph.ops):
        folded = None if op.name in covered or MARK in op.source else search.replacement(op)
        if folded is not None:
            new_op, match = folded
            covered |= match.ops - {op.name}
            op = new_op
        if op.name not in covered:
            ops.append(op)
    return rewrite(graph, reversed(ops))


@dataclass(frozen=True)
class _Search:
    graph: Graph
    ends: frozenset[str]

    def replacement(self, op: Op) -> tuple[Op, Match] | None:
        if len(op.results) != 1:
            return None
        for formula, make in _PARSED:
            for match in self.match(formula, op.results[0], Match()):
                new = make(match, op, self.graph) if self.alone(match, op) else None
                if new is not None:
                    return new, match
        return None

    def alone(self, match: Match, root: Op) -> bool:
        """True where nothing outside reads what the formula makes on its way, and no strategy is asked for it."""
        for name in match.ops:
            op = self.graph.by_op[name]
            inside = all(reader.name in match.ops for reader, _ in self.graph.consumers[op.results[0]])
            if MARK in op.source or (op is not root and not (inside and op.results[0] not in self.ends)):
                return False
        return True

    def match(self, formula: ast.expr, value: str, match: Match) -> Iterator[Match]:
        if isinstance(formula, ast.Name):
            bound = match.with_value(formula.id, value)
            if bound is not None:
                yield bound
            return
        op = self.graph.producers.get(value)
        if op is None:
            return
        if isinstance(formula, ast.Call):
            yield from self._call(formula, op, match)
        elif isinstance(formula, ast.BinOp):
            yield from _BINARY[type(formula.op)](self, formula, op, value, match)

    def _call(self, formula: ast.Call, op: Op, match: Match) -> Iterator[Match]:
        assert isinstance(formula.func, ast.Name)
        name, operand = formula.func.id, op.operands[0] if op.operands else None
        if op.target != f"aten.{name}" or operand is None or len(op.operands) != 1:
            return
        known: Match | None = match.over(op)
        if name == "mean" and known is not None:
            dims = _last_dims(op, len(self.graph.tensor(operand).shape))
            known = known.with_number("dims", dims) if dims else None
        if known is not None:
            yield from self.match(formula.args[0], operand, known)

    def _power(self, formula: ast.BinOp, op: Op, value: str, match: Match) -> Iterator[Match]:
        assert isinstance(formula.right, ast.Constant)
        base, exponent = op.operands[0] if op.operands else None, formula.right.value
        power = op.target == "aten.pow" and len(op.operands) == 1 and dict(op.attributes).get("exponent") == exponent
        square = exponent == 2 and op.target == "aten.square"
        twice = exponent == 2 and op.target == "aten.mul" and len(op.operands) == 2 and base == op.operands[1]
        if base is not None and (power or square or twice):
            yield from self.match(formula.left, base, match.over(op))

    def _quotient(self, formula: ast.BinOp, op: Op, value: str, match: Match) -> Iterator[Match]:
        if op.target != "aten.div" or len(op.operands) != 2 or dict(op.attributes).get("rounding_mode") is not None:
            return
        above, below = op.operands
        if above is not None and below is not None:
            for half in self.match(formula.left, above, match.over(op)):
                yield from self.match(formula.right, below, half)

    def _chain(self, formula: ast.BinOp, op: Op, value: str, match: Match) -> Iterator[Match]:
        """Products and sums: the number is equal, and the factors or terms are these in some order."""
        product = isinstance(formula.op, ast.Mult)
        number, words, parts = _wanted(formula, product)
        actual, factors, ops = self._parts(value, product, top=True)
        if not ops or len(factors) != len(parts):
            return
        known: Match | None = match.over(*ops)
        if words and known is not None:
            known = known.with_number(words[0], actual)
        elif not math.isclose(actual, number, rel_tol=EXACT):
            known = None
        if known is None:
            return
        for order in permutations(factors):
            yield from self._all(parts, order, known)

    def _all(self, parts: list[ast.expr], values: tuple[str, ...], match: Match) -> Iterator[Match]:
        if not parts:
            yield match
            return
        for one in self.match(parts[0], values[0], match):
            yield from self._all(parts[1:], values[1:], one)

    def _parts(self, value: str, product: bool, top: bool = False) -> tuple[float, list[str], list[Op]]:
        """The number, the other factors (or terms), and the operators of a chain; a value read twice is no link."""
        neutral, op = 1.0 if product else 0.0, self.graph.producers.get(value)
        linked = top or (len(self.graph.consumers[value]) == 1 and value not in self.ends)
        number = _number(op, product) if op is not None and linked else None
        if op is None or number is None:
            return neutral, [value], []
        factors: list[str] = []
        ops = [op]
        for operand in op.operands:
            inner, nested, links = self._parts(str(operand), product)
            number = number * inner if product else number + inner
            factors, ops = [*factors, *nested], [*ops, *links]
        return number, factors, ops


_BINARY = {
    ast.Mult: _Search._chain, ast.Add: _Search._chain, ast.Pow: _Search._power, ast.Div: _Search._quotient
}  # fmt: skip


def _wanted(formula: ast.BinOp, product: bool) -> tuple[float, list[str], list[ast.expr]]:
    """The number of a chain in a formula, the word for it if it may be any, and what else it joins."""
    number, words, parts = (1.0 if product else 0.0), list[str](), list[ast.expr]()
    for side in (formula.left, formula.right):
        if isinstance(side, ast.BinOp) and type(side.op) is type(formula.op):
            inner, more, nested = _wanted(side, product)
            number, words, parts = number * inner if product else number + inner, [*words, *more], [*parts, *nested]
        elif isinstance(side, ast.Constant):
            value = float(str(side.value))
            number = number * value if product else number + value
        elif isinstance(side, ast.Name) and side.id == "eps":
            words.append(side.id)
        else:
            parts.append(side)
    return number, words, parts


def _number(op: Op, product: bool) -> float | None:
    """The scalar that a link of a chain brings (or what changes nothing); None where the operator is no link."""
    attributes = dict(op.attributes)
    other, targets = attributes.get("other"), ("aten.mul", "aten.div") if product else ("aten.add",)
    scalar = isinstance(other, int | float) and not isinstance(other, bool)
    if op.target not in targets or attributes.get("alpha", 1) != 1 or attributes.get("rounding_mode") is not None:
        return None
    if None in op.operands or "self" in attributes or len(op.operands) != (1 if scalar else 2):
        return None
    if op.target == "aten.div":
        return 1 / float(other) if scalar and other else None  # type: ignore[arg-type]
    return float(other) if scalar else (1.0 if product else 0.0)  # type: ignore[arg-type]


def _last_dims(op: Op, rank: int) -> int:
    """How many of the last dims a mean is over; 0 where it is over others, drops them, or has a dtype of its own."""
    attributes = dict(op.attributes)
    dims = attributes.get("dim")
    axes = sorted(int(d) % rank for d in dims) if isinstance(dims, tuple) and all(type(d) is int for d in dims) else []  # type: ignore[arg-type]
    plain = attributes.get("keepdim") is True and attributes.get("dtype") is None
    return len(axes) if plain and axes == list(range(rank - len(axes), rank)) else 0
