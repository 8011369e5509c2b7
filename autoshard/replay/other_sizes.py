"""Numbers of the code that follow sizes of the inputs: found by lowering the same plan at others, not by their value.

A number that differs among the programs is written by the sizes (`batch`, `32 * batch`, `sequence - 1`), which a module
reads off its inputs, if all the code then comes out the same from each. Else every number stays as planned.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import product

from autoshard.errors import UserError
from autoshard.graph_capture.dynamic_sizes.graph_numbers import at_sizes, sizes_of
from autoshard.graph_capture.dynamic_sizes.numbers import MOST_POINTS, points_of
from autoshard.graph_capture.dynamic_sizes.polynomials import Point, reduced
from autoshard.ir.dynamic import Polynomial, Powers, monomial
from autoshard.ir.graph import Graph
from autoshard.ir.layout import LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import LocalAttribute, Program
from autoshard.program.lower import chosen_strategies, lower
from autoshard.rules.algebra.argument_rules import NoRule
from autoshard.rules.algebra.notation import RuleError
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.resize.captured_length import SEQUENCE, relengthened, sequence_length
from autoshard.rules.resize.rebatch import batch_size, rebatched

BATCH = "batch"


@dataclass(frozen=True)
class OtherSizes:
    """A program's decisions at other sizes. `names`: of the sizes that differ, at `planned` in the program itself.

    `points`: other sizes, and the program there; the last differs in all. `terms`: products of sizes that a number may
    be made of, one for each program. `scales`: a size of which all that follows it is a multiple. `check`: one more
    point, at which numbers must be what the others say. `fewer`: the same of fewer sizes, where the code does not
    follow all.
    """

    names: tuple[str, ...] = ()
    planned: Point = ()
    terms: tuple[Powers, ...] = ()
    points: tuple[tuple[Point, Program], ...] = ()
    scales: str = ""
    check: tuple[Point, Program] | None = None
    fewer: tuple[OtherSizes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.points)

    @property
    def programs(self) -> list[Program]:
        """Programs at the points."""
        return [program for _, program in self.points]

    @cached_property
    def inverse(self) -> list[list[Fraction]]:
        """Inverse of the matrix of terms at all points: times the values of a number, it gives its coefficients."""
        count = len(self.terms)
        rows = [[monomial(term, point) for term in self.terms] for point in self._every]
        matrix, rank = reduced([[*row, *(int(n == i) for i in range(count))] for n, row in enumerate(rows)], count)
        assert rank == count, "points are chosen to tell the terms apart"
        return [row[count:] for row in matrix]

    @property
    def _every(self) -> list[Point]:
        return [self.planned, *(point for point, _ in self.points)]

    def each(self, make: Callable[[Program], Program]) -> OtherSizes:
        """These sizes, with `make` applied to each program."""
        points = tuple((point, make(program)) for point, program in self.points)
        return replace(self, points=points, check=None, fewer=tuple(subset.each(make) for subset in self.fewer))

    def among(self, others: OtherSizes) -> OtherSizes:
        """`OtherSizes` of those sizes that `others` has too."""
        if {*self.names} <= {*others.names}:
            return self
        return next((subset for subset in self.fewer if {*subset.names} <= {*others.names}), OtherSizes())

    def of_the_farthest(self, base: Program) -> tuple[Program, OtherSizes]:
        """Program that differs from `base` in all sizes, and the other sizes as seen from it."""
        (point, program) = self.points[-1]
        points = (*self.points[:-1], (self.planned, base))
        return program, replace(self, planned=point, points=points, check=None, fewer=())

    def is_one(self, polynomial: Polynomial) -> bool:
        """True if a number can be this polynomial. What follows the size that scales is a multiple of it."""
        place = self.names.index(self.scales) if self.scales in self.names else -1
        return place < 0 or len({powers[place] > 0 for powers in polynomial}) == 1


class SizeNumber(int):
    """A number at the planned sizes that follows the sizes: `polynomial` gives it at any."""

    polynomial: Polynomial

    @classmethod
    def of(cls, values: Sequence[int], others: OtherSizes) -> SizeNumber:
        """Number from its values: as planned, then at the points."""
        number = cls(values[0])
        coeffs = (sum(entry * value for entry, value in zip(row, values, strict=True)) for row in others.inverse)
        number.polynomial = {powers: coeff for powers, coeff in zip(others.terms, coeffs, strict=True) if coeff}
        return number


def at_other_sizes(program: Program, plan: Plan, graph: Graph) -> OtherSizes:
    """Decisions of the plan at other dynamic sizes; without any, at twice the batch, and at another length if capture
    found that it can change.

    Empty for sizes that can't be followed, or at which a strategy is not offered, and for stages without dynamic sizes,
    which pass on tensors of fixed shapes. Made once for a program: the code and its report both ask.
    """
    known = graph.once(_known)
    if not known or known[-1][0] is not program or known[-1][1] is not plan:
        make = _at_dynamic_sizes if graph.dynamic else _at_other_sizes
        known[:] = [(program, plan, make(program, plan, graph))]
    return known[-1][2]


def _known(graph: Graph) -> list[tuple[Program, Plan, OtherSizes]]:
    """Last answer for this graph, in a list that `at_other_sizes` fills."""
    return []


def _at_dynamic_sizes(program: Program, plan: Plan, graph: Graph) -> OtherSizes:
    choices, planned = chosen_strategies(plan, graph), tuple(sizes_of(graph).values())
    terms = terms_of(graph)
    chosen: list[Point] = [planned]
    left: list[Point] = []
    for point in points_of(graph.dynamic, planned, len(terms) + MOST_POINTS)[1:]:
        apart = len(chosen) < len(terms) and _apart([*chosen, point], terms)
        (chosen if apart else left).append(point)
    if len(chosen) < len(terms):
        return OtherSizes()
    chosen.sort(key=lambda point: (point != planned, sum(a != b for a, b in zip(point, planned, strict=True))))
    names = tuple(size.name for size in graph.dynamic)
    points = []
    for point in [*chosen[1:], *left[:1]]:
        other = at_sizes(graph, dict(zip(names, point, strict=True)))
        lowered = _lowered(program, plan, choices, other, 1)
        if lowered is None:
            return OtherSizes()
        points.append((point, lowered))
    check = points.pop() if left else None
    return OtherSizes(names, planned, terms, tuple(points), check=check)


def terms_of(graph: Graph) -> tuple[Powers, ...]:
    """Products of sizes that numbers of the graph are made of, and so those of each device; 1 among them."""
    terms = {term.powers for follows in graph.follows for term in follows.terms}
    known = {place: follows.polynomial() for follows in graph.follows for place in follows.places}
    for op in graph.ops:  # a mean of parts divides by how many numbers there are in all
        if all(graph.tensor(name).numel == 1 for name in op.results):
            for name in filter(None, op.operands):
                dims = range(len(graph.tensor(name).shape))
                terms.update(_numbers_of([known[place] for dim in dims if (place := f"{name} {dim}") in known]))
    return tuple(sorted({*terms, (0,) * len(graph.dynamic)}, key=lambda powers: (sum(powers), powers)))


def _numbers_of(dims: Sequence[Polynomial]) -> set[Powers]:
    """Products of sizes in the number of elements of a tensor with these dynamic dims."""
    every = [[*dim] for dim in dims]
    return {tuple(map(sum, zip(*chosen, strict=True))) for chosen in product(*every)} if every else set()


def _apart(points: Sequence[Point], terms: Sequence[Powers]) -> bool:
    """True if the rows of terms at these points are independent."""
    return reduced([[monomial(term, point) for term in terms] for point in points], len(terms))[1] == len(points)


def _at_other_sizes(program: Program, plan: Plan, graph: Graph) -> OtherSizes:
    if plan.step.parts:
        return OtherSizes()
    choices = chosen_strategies(plan, graph)
    batch = _lowered(program, plan, choices, graph, 2)
    length, other = sequence_length(graph), _other_length(graph)
    longer = _relengthened(graph, other) if other else None
    sequence = _lowered(program, plan, choices, longer, 1) if longer else None
    samples = batch_size(graph) if batch else 0
    alone = _alone(BATCH, samples, 2 * samples, batch), _alone(SEQUENCE, length, other, sequence)
    both = _lowered(program, plan, choices, longer, 2) if longer and batch and sequence else None
    if both is None:
        return alone[0] or (alone[1] if batch is None else OtherSizes())
    assert batch is not None and sequence is not None
    points = (((2 * samples, length), batch), ((samples, other), sequence), ((2 * samples, other), both))
    fewer = tuple(subset for subset in alone if subset)
    terms = tuple(product((0, 1), repeat=2))
    return OtherSizes((BATCH, SEQUENCE), (samples, length), terms, points, BATCH, None, fewer)


def _alone(name: str, planned: int, other: int, program: Program | None) -> OtherSizes:
    """`OtherSizes` with one size."""
    if program is None:
        return OtherSizes()
    return OtherSizes((name,), (planned,), ((0,), (1,)), (((other,), program),), BATCH)


def _other_length(graph: Graph) -> int:
    """Length twice as long if possible, else half; 0 for none."""
    planned = sequence_length(graph)
    size = next((size for size in graph.free_sizes if size.name == SEQUENCE and not size.fixed), None)
    if size is None or not planned:
        return 0
    return next((length for length in (2 * planned, planned // 2) if size.least <= length <= size.most), 0)


def _relengthened(graph: Graph, length: int) -> Graph | None:
    try:
        return relengthened(graph, length)
    except UserError:
        return None


def _lowered(program: Program, plan: Plan, choices: Mapping[str, Strategy], other: Graph, times: int) -> Program | None:
    """Program on `other`, at `times` the batch, if all decisions can be the same: `choices`, by operator."""
    try:
        other = rebatched(other, times * batch_size(other)) if times > 1 else other
        chosen = chosen_strategies(plan, other)
        return _alike(program, lower(plan, other, chosen)) if chosen == choices else None  # not cut in samples, say
    except (UserError, NoRule, RuleError):
        return None


def _alike(program: Program, other: Program) -> Program | None:
    """`other`, if it has the same values in the same layouts."""
    ours, theirs = ([(v.name, v.layout) for v in variant.values] for variant in (program, other))
    return other if ours == theirs and len(program.instructions) == len(other.instructions) else None


def followed(values: Sequence[LocalAttribute], mesh: Mesh, others: OtherSizes) -> LocalAttribute:
    """The first of `values`, with a `SizeNumber` for each size that differs at the points, where the others are."""
    first = values[0]
    if all(isinstance(value, tuple) for value in values):
        if len({len(value) for value in values if isinstance(value, tuple)}) > 1:
            return first
        rows = zip(*(value for value in values if isinstance(value, tuple)), strict=True)
        return tuple(followed(row, mesh, others) for row in rows)
    if all(value == first for value in values) or not all(_is_size(value, mesh) for value in values):
        return first
    number = SizeNumber.of([local_size(value, mesh) for value in values], others)
    return number if others.is_one(number.polynomial) else first


def _is_size(value: LocalAttribute, mesh: Mesh) -> bool:
    if isinstance(value, LocalSize):
        return value.is_even(mesh)
    return isinstance(value, int) and not isinstance(value, bool)


def local_size(value: LocalAttribute, mesh: Mesh) -> int:
    """Local size, of one that is the same on all devices."""
    assert isinstance(value, LocalSize | int)
    return value.largest(mesh) if isinstance(value, LocalSize) else value


def same_code(first: Iterable[list[str]], second: Iterable[list[str]]) -> bool:
    """True if classes are equal but for comments, docstrings (which give the planned shapes) and `del`."""
    return list(map(_code, first)) == list(map(_code, second))


def _code(lines: list[str]) -> str:
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError as error:
        raise AssertionError(f"model_parallel.py as written is no Python: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.body = [stmt for stmt in node.body if not (_is_text(stmt) or isinstance(stmt, ast.Delete))]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
