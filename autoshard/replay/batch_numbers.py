"""Which numbers of the code follow the batch: found by lowering the same plan at another batch, not by their value.

A number that differs between the two programs is written by the batch (`batch`, `32 * batch`), which a module reads off
its input; it is, where all the code then comes out the same from both. Else every number stays as it is.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable

from autoshard.errors import UserError
from autoshard.ir.graph import Graph
from autoshard.ir.layout import LocalSize
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import LocalAttribute, Program
from autoshard.program.lower import chosen_strategies, lower
from autoshard.rules.algebra.argument_rules import NoRule
from autoshard.rules.algebra.notation import RuleError
from autoshard.rules.rebatch import batch_size, rebatched


class BatchNumber(int):
    """A local size of the planned batch, in proportion to it."""


def at_another_batch(program: Program, plan: Plan, graph: Graph) -> Program | None:
    """The same decisions for twice the batch. None where the batch can't be followed, or a strategy is not offered
    there; of stages, which hand on tensors of fixed shapes, too."""
    if plan.step.parts:
        return None
    try:
        other = rebatched(graph, 2 * batch_size(graph))
        if chosen_strategies(plan, graph) != chosen_strategies(plan, other):  # cut in as many blocks as samples, say
            return None
        return _alike(program, lower(plan, other))
    except (UserError, NoRule, RuleError):
        return None


def _alike(program: Program, other: Program) -> Program | None:
    """`other`, where it has the same values in the same layouts."""
    own, theirs = ([(v.name, v.layout) for v in made.values] for made in (program, other))
    return other if own == theirs and len(program.instructions) == len(other.instructions) else None


def followed(own: LocalAttribute, other: LocalAttribute, mesh: Mesh) -> LocalAttribute:
    """`own` with a `BatchNumber` for each size that differs in `other`."""
    if isinstance(own, tuple) and isinstance(other, tuple) and len(own) == len(other):
        return tuple(followed(a, b, mesh) for a, b in zip(own, other, strict=True))
    if own == other or not (_is_size(own, mesh) and _is_size(other, mesh)):
        return own
    return BatchNumber(local_size(own, mesh))


def _is_size(value: LocalAttribute, mesh: Mesh) -> bool:
    if isinstance(value, LocalSize):
        return value.is_even(mesh)
    return isinstance(value, int) and not isinstance(value, bool)


def local_size(value: LocalAttribute, mesh: Mesh) -> int:
    """Of a size that is the same on all devices."""
    assert isinstance(value, LocalSize | int)
    return value.largest(mesh) if isinstance(value, LocalSize) else value


def in_terms_of(name: str, size: int, number: int) -> str:
    """`number` by a variable that now has `size`: exact at every batch at which both are whole."""
    shared = math.gcd(size, number)
    times, parts = number // shared, size // shared
    text = name if times == 1 else f"{times} * {name}"
    return text if parts == 1 else f"{text} // {parts}"


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
