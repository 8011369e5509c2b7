"""Types and helpers that the files of the table share: rules that depend on arguments, and the arguments of a shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from string import ascii_lowercase

from autoshard.ir.graph import Attribute, Graph, Op
from autoshard.ir.layout import AxisShard, Layout, LocalSize, local_sizes
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.instance import Instance
from autoshard.rules.algebra.strategy import Strategy

LocalAttribute = Attribute | LocalSize | tuple["LocalAttribute", ...]  # as in program.model, which stands downstream


class NoRule(Exception):
    """Raised by a rule function for arguments it has no rule for: the operator can only be repeated."""


@dataclass(frozen=True)
class OperatorCall:
    """One operator as a rule function sees it. `shapes` are the operands' (None: absent), `results` the results'.

    `infinite`: the operands that may hold infinities; `positive`: those of which all numbers are above 0.
    """

    op: Op
    shapes: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[str | None, ...]
    results: tuple[tuple[int, ...], ...]
    infinite: frozenset[int] = frozenset()
    positive: frozenset[int] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of operand 0."""
        shape = self.shapes[0]
        assert shape is not None, self.op.name
        return shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def present(self) -> int:
        """Number of tensor operands."""
        return sum(shape is not None for shape in self.shapes)

    def get(self, name: str, default: Attribute = None) -> Attribute:
        return dict(self.op.attributes).get(name, default)

    def number(self, name: str) -> float | None:
        """Number in a tensor's place."""
        value = self.get(name)
        return float(value) if isinstance(value, int | float) else None

    def integer(self, name: str, default: int = 0) -> int:
        value = self.get(name, default)
        return value if isinstance(value, int) else default

    def dim(self, name: str = "dim", default: int = 0, rank: int | None = None) -> int:
        """Dim argument, counted from 0. Raises NoRule for a tensor that has no dims."""
        rank = self.rank if rank is None else rank
        if rank < 1:
            raise NoRule
        return self.integer(name, default) % rank

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """Dims argument, counted from 0; None or () means all."""
        value = self.get(name)
        listed = (value,) if isinstance(value, int) else integers(value)
        return tuple(dim % self.rank for dim in listed) if listed and self.rank else tuple(range(self.rank))


@dataclass(frozen=True)
class Local:
    """One operator with its strategy, as seen by the functions that rewrite arguments. `drawn` is its ordinal among the
    operators that draw random numbers."""

    graph: Graph
    op: Op
    instance: Instance
    strategy: Strategy
    mesh: Mesh
    drawn: int = -1

    def sizes(self, shape: Sequence[int], layout: Layout) -> tuple[LocalAttribute, ...]:
        """Local shape: plain integers where nothing shards a dim."""
        return tuple(size if size.shards else size.size for size in local_sizes(shape, layout, self.mesh))

    def operand(self, position: int) -> tuple[LocalAttribute, ...]:
        facts, layout = self.instance.operands[position], self.strategy.operands[position]
        assert facts is not None and layout is not None
        return self.sizes(facts.shape, layout)

    def result(self, position: int = 0) -> tuple[LocalAttribute, ...]:
        return self.sizes(self.instance.results[position].shape, self.strategy.results[position])

    def factor(self, name: str) -> LocalAttribute:
        """The local size of a factor."""
        chosen = zip(self.mesh.names, self.strategy.choices, strict=True)
        cuts = tuple(AxisShard(axis, c.blocks, c.unit) for axis, c in chosen if c.factor == name)
        return LocalSize(self.instance.size[name], cuts) if cuts else self.instance.size.get(name, 1)

    def axes(self, *factors: str) -> tuple[str, ...]:
        """The mesh axes on these factors, in mesh order."""
        return tuple(n for n, c in zip(self.mesh.names, self.strategy.choices, strict=True) if c.factor in factors)


RuleFor = Callable[[OperatorCall], str]
Localise = Callable[[Local], dict[str, LocalAttribute]]
Axes = tuple[tuple[str, tuple[str, ...]], ...]
LocaliseVariant = Callable[[Local], tuple[dict[str, LocalAttribute], Axes]]


def integers(value: Attribute) -> tuple[int, ...]:
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()


def letters(count: int) -> list[str]:
    return list(ascii_lowercase[:count])


def term(dims: Sequence[str]) -> str:
    return " ".join(dims) or "()"


def replaced(dims: Sequence[str], changes: dict[int, str]) -> str:
    """Term with some dims rewritten; a dim written as "" is left out."""
    return term([text for text in (changes.get(i, d) for i, d in enumerate(dims)) if text])


def linear_factors(call: OperatorCall) -> str:
    """Linear option of a product: in each factor whose other is finite, since a part that is 0 times inf is NaN."""
    if len(call.shapes) == 1:
        return " | linear: 0" if math.isfinite(call.number("other") or 0) else ""
    linear = [str(i) for i in (0, 1) if 1 - i not in call.infinite]
    return f" | linear: {', '.join(linear)}" if linear else ""


def parts(sizes: Sequence[int], factor: str) -> list[str]:
    """Lengths as multiples of their greatest common divisor: [8, 4] -> ["(2 h)", "h"]; literals if it is 1, or 0."""
    unit = gcd(*sizes)
    if unit == 1:
        return [str(size) for size in sizes]
    return ["0" if not size else factor if size == unit else f"({size // unit} {factor})" for size in sizes]
