"""The table of operators, all kinds together, and the one way from an operator to its bound rule."""

from __future__ import annotations

from functools import cache

from autoshard.ir.graph import Graph, Op, Tensor
from autoshard.rules.algebra.argument_rules import NoRule, OperatorCall, integers
from autoshard.rules.algebra.instance import Instance, TensorFacts, bind, unbound
from autoshard.rules.algebra.notation import Rule, RuleError
from autoshard.rules.finite_values import signs
from autoshard.rules.operators import constants, record

# What a rule says of shapes and arguments that it was not written for.
CONTRADICTIONS = (RuleError, LookupError, TypeError, ValueError, ArithmeticError, AssertionError)


def has_rule(graph: Graph, op: Op) -> bool:
    """False where the table does not know the operator (with these arguments), so that it can only be repeated."""
    return instance(graph, op).known


def rule_text(graph: Graph, op: Op) -> str:
    """Line of the table, with a rule function's answer in its place, or the rule that was discovered.

    Raises NoRule if there is none: "" is recorded for an operator that the table's rule is not for.
    """
    rule = graph.rule_of.get(op.name, record(op.target).rule)
    if not rule:
        raise NoRule(op.target)
    return rule if isinstance(rule, str) else rule(call(graph, op))


def call(graph: Graph, op: Op) -> OperatorCall:
    """Operator as rule functions see it."""
    tensors = [None if name is None else graph.tensor(name) for name in op.operands]
    shapes = tuple(None if tensor is None else tensor.shape for tensor in tensors)
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
    results = tuple(graph.tensor(name).shape for name in op.results)
    return OperatorCall(op, shapes, dtypes, results, *signs(graph).of(op))


def instance(graph: Graph, op: Op) -> Instance:
    """Rule of an op bound to its shapes. An op that depends on no input, or has no rule, can only be repeated."""
    known = graph.once(_instances)
    if id(op) not in known:
        known[id(op)] = _instance(graph, op), op
    return known[id(op)][0]


def _instances(graph: Graph) -> dict[int, tuple[Instance, Op]]:
    """Bound rules by the address of their op, which is kept alive next to its answer."""
    return {}


def _instance(graph: Graph, op: Op) -> Instance:
    if depends_on_nothing(graph, op):
        return unbound(*_facts(graph, op), True)
    try:
        return bound(graph, op, rule_text(graph, op))
    except (NoRule, RuleError):
        return unbound(*_facts(graph, op), False)


def fits(graph: Graph, op: Op) -> bool:
    """True if the rule of the table is one for this overload. It may be written for another of the same name."""
    try:
        bound(graph, op, rule_text(graph, op))
    except NoRule:
        return True  # says so itself: not with these arguments
    except CONTRADICTIONS:
        return False
    return True


def depends_on_nothing(graph: Graph, op: Op) -> bool:
    """True if each device makes the results by itself, whatever the plan."""
    return record(op.target).repeated or constants(graph).issuperset(op.results)


def bound(graph: Graph, op: Op, text: str) -> Instance:
    """A rule bound to the shapes of an op; RuleError where they contradict it."""
    normalised = integers(dict(op.attributes).get("normalized_shape"))
    return _bound(text, *_facts(graph, op), len(normalised) or None)


def _facts(graph: Graph, op: Op) -> tuple[tuple[TensorFacts | None, ...], tuple[TensorFacts, ...]]:
    """Facts of the operands and of the results."""
    operands = tuple(None if name is None else facts_of(graph.tensor(name)) for name in op.operands)
    return operands, tuple(facts_of(graph.tensor(name)) for name in op.results)


@cache
def _bound(
    text: str, operands: tuple[TensorFacts | None, ...], results: tuple[TensorFacts, ...], star: int | None
) -> Instance:
    return bind(Rule.parse(text), operands, results, star)


def facts_of(tensor: Tensor) -> TensorFacts:
    """Facts about a tensor that a rule needs."""
    return TensorFacts(tensor.shape, tensor.dtype, tensor.requires_grad)
