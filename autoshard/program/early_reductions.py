"""Which reductions of an activation's gradient overlap with a weight product: those of column-parallel linears.

The gradient of what a linear reads is a partial sum where the weight is sharded along its outputs. Of all that read the
same value, the linear that comes first in the program comes last in backward: its part completes the sum, and the
gradients of its own weight and bias need nothing that is on its way.
(Megatron-LM: `linear_with_grad_accumulation_and_async_allreduce`.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.ir.program import Collective, Compute, Instruction, LocalValue
from autoshard.program.module_scopes import reads_of, results_of
from autoshard.program.module_tree import Definition, Item, Loop, ModuleCall, ModuleTree
from autoshard.program.weights import weight_steps
from autoshard.rules.algebra.float8_products import IN_FLOAT8

LINEARS = frozenset({*IN_FLOAT8, *IN_FLOAT8.values()})
# the calls of the runtime; the second also gives the input, as others read it
ALONE, SHARED = "column_parallel", "shared_column_parallel"
# what is done to the value, and to its gradient: R -> R+ and S -> R+
_REDUCTIONS = frozenset({("", "all_reduce"), ("all_gather", "reduce_scatter")})


def with_early_reductions(
    instructions: Sequence[Instruction], values: Mapping[str, LocalValue], parameters: Iterable[str]
) -> tuple[Instruction, ...]:
    """Instructions with `early` set. `parameters`: values in their stored form."""
    ways = weight_steps(instructions, parameters, values)
    marked = list(instructions)
    for index, step in enumerate(instructions):
        if isinstance(step, Collective) and step.operand not in ways and _may_be(step, values):
            linear = _first_reader(instructions, index, ways)
            if linear is not None and _has_weight_product(linear, step.result, values):
                marked[index] = replace(step, early=True)
    return tuple(marked)


def early_linears(items: Sequence[object]) -> dict[int, int]:
    """Position of a linear -> that of the early collective that it reads, in a program or in the body of a class."""
    linears: dict[int, int] = {}
    waiting: dict[str, int] = {}
    for position, step in enumerate(items):
        if isinstance(step, Collective) and step.early:
            waiting[step.result] = position
        elif isinstance(step, Compute) and waiting and step.operands and step.operands[0] in waiting:
            linears[position] = waiting.pop(step.operands[0] or "")
    return linears


def _may_be(step: Collective, values: Mapping[str, LocalValue]) -> bool:
    plain = not (step.regathered or step.once or step.gradient_dtype)
    return plain and (step.forward, step.backward) in _REDUCTIONS and values[step.operand].requires_grad


def _first_reader(instructions: Sequence[Instruction], index: int, ways: Collection[str]) -> Compute | None:
    """Next instruction, apart from those on the way to its other operands, if it is a linear of plain local tensors."""
    step = next((step for step in instructions[index + 1 :] if results_of(step)[0] not in ways), None)
    plain = isinstance(step, Compute) and step.target in LINEARS and not step.variant and not step.host
    return step if isinstance(step, Compute) and plain else None


def _has_weight_product(linear: Compute, read: str, values: Mapping[str, LocalValue]) -> bool:
    """True if backward computes the gradient of a weight, next to that of the input `read`."""
    first, weight, *_ = linear.operands
    has_grad = values[linear.results[0]].requires_grad
    once = linear.operands.count(read) == 1
    return first == read and once and has_grad and weight is not None and values[weight].requires_grad


@dataclass(frozen=True)
class ColumnParallel(Compute):
    """A linear with the early collective that it reads, as the one call that a class makes of both. It reads what
    `moves` is given; with two results, the first is what `moves` makes."""

    moves: Collective | None = None


def with_column_parallel(tree: ModuleTree) -> ModuleTree:
    """The tree with these calls in its bodies, in the place of the linears and their collectives."""
    return ModuleTree(tuple(replace(d, body=_body(d)) for d in tree.definitions))


def _body(definition: Definition) -> tuple[Item, ...]:
    body = list(definition.body)
    linears = early_linears(body)
    ends = {*definition.outputs, *(new for _, new in definition.updates)}
    for linear, start in linears.items():
        compute, moves = body[linear], body[start]
        assert isinstance(compute, Compute) and isinstance(moves, Collective)
        others = {value for i, item in enumerate(body) if i != linear for value in _reads(item)}
        body[linear] = _merged(compute, moves, shared=moves.result in others | ends)
    return tuple(item for i, item in enumerate(body) if i not in linears.values())


def _merged(linear: Compute, moves: Collective, *, shared: bool) -> ColumnParallel:
    return ColumnParallel(
        linear.op,
        linear.target,
        (moves.operand, *linear.operands[1:]),
        (),
        (moves.result, *linear.results) if shared else linear.results,
        linear.module,
        linear.source,
        linear.strategy,
        SHARED if shared else ALONE,
        (("axis", moves.axes),),
        linear.regathered,
        moves=moves,
    )


def _reads(item: Item) -> Sequence[str | None]:
    return item.arguments if isinstance(item, ModuleCall | Loop) else reads_of(item)
