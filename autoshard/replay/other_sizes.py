"""Which numbers of the code follow a size of the inputs: found by lowering the same plan at others, not by their value.

A number that differs between the two programs is written by the batch and the sequence (`batch`, `32 * batch`,
`sequence - 1`), which a module reads off its input; it is, where all the code then comes out the same from both. Else
every number stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from autoshard.errors import UserError
from autoshard.ir.graph import Graph
from autoshard.ir.layout import LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import LocalAttribute, Program
from autoshard.program.lower import chosen_strategies, lower
from autoshard.rules.algebra.argument_rules import NoRule
from autoshard.rules.algebra.notation import RuleError
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.captured_length import SEQUENCE, own_length, relengthened
from autoshard.rules.rebatch import batch_size, rebatched


@dataclass(frozen=True)
class OtherSizes:
    """A program's decisions at other sizes: twice its batch, another length of its sequences, both; None of what can't.

    `length`: of its own sequences, `more`: what the other ones have in addition.
    """

    batch: Program | None = None
    sequence: Program | None = None
    both: Program | None = None
    length: int = 0
    more: int = 0

    def __bool__(self) -> bool:
        return self.batch is not None or self.sequence is not None

    def each(self, make: Callable[[Program], Program]) -> OtherSizes:
        """With what `make` makes of each program."""
        batch, sequence, both = (own and make(own) for own in (self.batch, self.sequence, self.both))
        return OtherSizes(batch, sequence, both, self.length, self.more)

    def among(self, others: OtherSizes) -> OtherSizes:
        """Those of which `others` has one, too."""
        batch, sequence = self.batch if others.batch else None, self.sequence if others.sequence else None
        return replace(self, batch=batch, sequence=sequence, both=self.both if others.both else None)

    def of_the_farthest(self, own: Program) -> tuple[Program, OtherSizes]:
        """The program that differs from `own` in all, with these sizes as others of its own."""
        if self.both is not None:
            return self.both, OtherSizes(self.sequence, self.batch, None, self.length + self.more, -self.more)
        if self.batch is not None:
            assert self.sequence is None, "the two were not followed together"
            return self.batch, OtherSizes(own)
        assert self.sequence is not None
        return self.sequence, OtherSizes(None, own, None, self.length + self.more, -self.more)


class SizeNumber(int):
    """A local number of the planned sizes that follows these: `batch`, in proportion to it, and by `slope` more for
    each unit of the sequences' length. `rest`: what it would be at a length of 0."""

    batch: bool
    slope: Fraction
    rest: Fraction

    @classmethod
    def of(cls, number: int, at_batch: int, at_length: int, others: OtherSizes) -> SizeNumber:
        made = cls(number)
        made.batch = at_batch != number
        made.slope = Fraction(at_length - number, others.more) if at_length != number else Fraction(0)
        made.rest = number - made.slope * others.length
        return made


def at_other_sizes(program: Program, plan: Plan, graph: Graph) -> OtherSizes:
    """The same decisions for twice the batch, and for another length where capture found that it can change.

    None of what can't be followed, or where a strategy is not offered; of stages, which hand on tensors of fixed
    shapes, too. Made once for a program: the code and its report both ask.
    """
    known = graph.once(_known)
    if not known or known[-1][0] is not program or known[-1][1] is not plan:
        known[:] = [(program, plan, _at_other_sizes(program, plan, graph))]
    return known[-1][2]


def _known(graph: Graph) -> list[tuple[Program, Plan, OtherSizes]]:
    """What was asked of this graph last."""
    return []


def _at_other_sizes(program: Program, plan: Plan, graph: Graph) -> OtherSizes:
    if plan.step.parts:
        return OtherSizes()
    own = chosen_strategies(plan, graph)
    batch = _lowered(program, plan, own, graph, 2)
    length, other = own_length(graph), _other_length(graph)
    longer = _relengthened(graph, other) if other else None
    if longer is None:
        return OtherSizes(batch)
    sequence = _lowered(program, plan, own, longer, 1)
    both = _lowered(program, plan, own, longer, 2) if batch and sequence else None
    if sequence is None or (batch is not None and both is None):
        return OtherSizes(batch)
    return OtherSizes(batch, sequence, both, length, other - length)


def _other_length(graph: Graph) -> int:
    """Twice as long where that may be, else half; 0 for none."""
    own = own_length(graph)
    size = next((size for size in graph.free_sizes if size.name == SEQUENCE and not size.fixed), None)
    if size is None or not own:
        return 0
    return next((length for length in (2 * own, own // 2) if size.least <= length <= size.most), 0)


def _relengthened(graph: Graph, length: int) -> Graph | None:
    try:
        return relengthened(graph, length)
    except UserError:
        return None


def _lowered(program: Program, plan: Plan, own: Mapping[str, Strategy], other: Graph, times: int) -> Program | None:
    """The plan on `other`, at `times` its batch, where all decisions can be the same: `own`, of its operators."""
    try:
        other = rebatched(other, times * batch_size(other)) if times > 1 else other
        chosen = chosen_strategies(plan, other)
        return _alike(program, lower(plan, other, chosen)) if chosen == own else None  # not cut in samples, say
    except (UserError, NoRule, RuleError):
        return None


def _alike(program: Program, other: Program) -> Program | None:
    """`other`, where it has the same values in the same layouts."""
    own, theirs = ([(v.name, v.layout) for v in made.values] for made in (program, other))
    return other if own == theirs and len(program.instructions) == len(other.instructions) else None


def followed(
    own: LocalAttribute, at_batch: LocalAttribute, at_length: LocalAttribute, mesh: Mesh, others: OtherSizes
) -> LocalAttribute:
    """`own` with a `SizeNumber` for each size that differs at another batch or another length."""
    if isinstance(own, tuple) and isinstance(at_batch, tuple) and isinstance(at_length, tuple):
        if len(own) != len(at_batch) or len(own) != len(at_length):
            return own
        return tuple(followed(*each, mesh, others) for each in zip(own, at_batch, at_length, strict=True))
    if own == at_batch == at_length or not all(_is_size(value, mesh) for value in (own, at_batch, at_length)):
        return own
    number, of_batch, of_length = (local_size(value, mesh) for value in (own, at_batch, at_length))
    return SizeNumber.of(number, of_batch, of_length, others)


def _is_size(value: LocalAttribute, mesh: Mesh) -> bool:
    if isinstance(value, LocalSize):
        return value.is_even(mesh)
    return isinstance(value, int) and not isinstance(value, bool)


def local_size(value: LocalAttribute, mesh: Mesh) -> int:
    """Of a size that is the same on all devices."""
    assert isinstance(value, LocalSize | int)
    return value.largest(mesh) if isinstance(value, LocalSize) else value


def same_code(first: Iterable[list[str]], second: Iterable[list[str]]) -> bool:
    """Of classes, but for comments, docstrings (which give the planned shapes) and what is let go (large values)."""
    return list(map(_code, first)) == list(map(_code, second))


def _code(lines: list[str]) -> str:
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError as error:
        raise AssertionError(f"model_parallel.py as written is no Python: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.body = [own for own in node.body if not (_is_text(own) or isinstance(own, ast.Delete))]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
