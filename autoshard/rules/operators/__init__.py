"""The table of operators, one file per kind."""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.graph import Graph, Op
from autoshard.rules.algebra.operator_record import Operator
from autoshard.rules.algebra.saved_for_backward import SAVED
from autoshard.rules.algebra.variant_record import OperatorVariant
from autoshard.rules.operators import (
    attention,
    convolution,
    creation,
    elementwise,
    experts,
    images,
    indexing,
    linear_algebra,
    losses,
    normalisation,
    random,
    recurrent,
    reductions,
    views,
    writing,
)

KINDS = (
    linear_algebra, attention, experts, normalisation, elementwise, reductions, views,
    indexing, writing, convolution, images, recurrent, losses, random, creation,
)  # fmt: skip
_KNOWN = {target: known for kind in KINDS for target, known in kind.OPERATORS.items()}
_SAVED = {f"aten.{name}": saves for names, saves in SAVED for name in names.split()}
OPERATORS: dict[str, Operator] = _KNOWN | {
    target: replace(_KNOWN[target], saves=saves) for target, saves in _SAVED.items()
}
VARIANTS: dict[str, OperatorVariant] = {
    name: record for kind in KINDS for name, record in getattr(kind, "VARIANTS", {}).items()
}
EXCHANGING = frozenset(name for name, known in VARIANTS.items() if known.exchanges)
_UNKNOWN = Operator()


def record(target: str) -> Operator:
    """Record of an operator; the defaults for one that the table lacks."""
    return OPERATORS.get(target, _UNKNOWN)


def is_random(op: Op) -> bool:
    """True if the op draws random numbers. Its ordinal among those that do is part of the seed."""
    draws = record(op.target).draws
    if draws is None:
        return False
    arguments = dict(op.attributes)
    return all(arguments.get(name) for name in draws)


def drops_all(op: Op) -> bool:
    """True for a dropout of everything. It counts as random, and torch draws no number for it."""
    arguments = dict(op.attributes)
    return is_random(op) and any(arguments[n] == 1 and arguments[n] is not True for n in record(op.target).draws or ())


def random_index(graph: Graph, op: Op) -> int:
    """Ordinal of a random op in execution order; -1 of one that draws nothing."""
    return graph.once(_ordinals).get(op.name, -1)


def _ordinals(graph: Graph) -> dict[str, int]:
    drawing = [op.name for op in graph.ops if is_random(op)]
    return {name: ordinal for ordinal, name in enumerate(drawing)}


def constants(graph: Graph) -> frozenset[str]:
    """Tensors that depend on no input, parameter, buffer or random number: the same on every device, always."""
    return graph.once(_constants)


def _constants(graph: Graph) -> frozenset[str]:
    result: set[str] = set()
    for op in graph.ops:
        fixed = record(op.target).draws is None
        if fixed and all(operand is None or operand in result for operand in op.operands):
            result.update(op.results)
    return frozenset(result)
