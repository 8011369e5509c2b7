"""Checks that a graph read from a file is consistent: its operators against their rules; torch is asked only about
those without a rule."""

from __future__ import annotations

from collections.abc import Collection

from autoshard.errors import InvalidFileError
from autoshard.ir.graph import OPTIMIZERS, OWN_NAMESPACES, PRECISIONS, Graph, GraphFault, Op, require
from autoshard.ir.recipe_check import OWN_CALLS
from autoshard.rules.algebra.argument_rules import NoRule
from autoshard.rules.algebra.notation import Rule, RuleError
from autoshard.rules.operator_table import CONTRADICTIONS, bound, depends_on_nothing, rule_text
from autoshard.rules.operators import record

_MORE = "is none that a graph may call: it does more than compute tensors of tensors and numbers"
# What constructors call that the table of operators has not; torch is not asked for these.
INITIALISERS = frozenset({
    "copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "rand", "randn",
    "randint", "randperm", "empty", "empty_like", "empty_strided", "new_empty", "as_strided", "lift_fresh", "detach",
    "erfinv_",
})  # fmt: skip


def check_saved(graph: Graph, where: str) -> Graph:
    """Returns the graph; InvalidFileError if the file `where` contradicts itself."""
    try:
        check_rules(graph)
    except GraphFault as error:
        hint = "make it again with `autoshard trace MODEL -o FILE`"
        raise InvalidFileError(f"{where} is damaged: {error}", hint) from None
    return graph


def check_rules(graph: Graph) -> None:
    """Raises GraphFault for the first operator whose shapes or arguments contradict its rule or can't be planned."""
    require(graph.outputs, "it has no outputs: nothing would be computed")
    require(graph.loss is None or graph.loss in graph.outputs, f"the loss {graph.loss} is no output")
    require(graph.precision in PRECISIONS, f"the precision is {graph.precision!r}: expected {', '.join(PRECISIONS)}")
    require(graph.optimizer in OPTIMIZERS, f"the optimizer is {graph.optimizer!r}: expected {', '.join(OPTIMIZERS)}")
    for name, text in graph.discovered:
        require(name in graph.by_op, f"a rule was discovered for op {name}, which there is not")
        if text:
            _parsed(name, text)
    registered = {target for item in graph.registrations for target in item.targets}
    for op in graph.ops:
        _check_target(op, registered)
        if not depends_on_nothing(graph, op):
            _check_op(graph, op)
    _check_recipes(graph)


def _check_target(op: Op, registered: Collection[str]) -> None:
    """Checks that `op` is in the table, of torch on tensors alone, or of a registration that the graph names."""
    namespace = op.target.partition(".")[0]
    if _is_of_table(op.target):
        return
    if namespace not in OWN_NAMESPACES:
        require(op.target in registered, f"op {op.name}: nothing in it says where {op.target} comes from")
        return
    from autoshard.graph_capture.overloads import is_harmless, is_operator  # imports torch

    there = namespace != "autoshard" and is_operator(op.target)
    require(there, f"op {op.name}: there is no operator {op.target}")
    require(is_harmless(op.target), f"op {op.name}: {op.target} {_MORE}")


def _is_of_table(target: str) -> bool:
    known = record(target)
    return known.rule is not None or known.repeated


def _check_recipes(graph: Graph) -> None:
    """Checks the calls with which a package makes buffers: these operators, or those that change their operand 0."""
    for recipe in graph.recipes:
        for target in {call.target for call in recipe.calls} - set(OWN_CALLS):
            namespace, name, overload = target.split(".")
            functional = f"{namespace}.{name.removesuffix('_')}"
            if name in INITIALISERS or _is_of_table(functional):
                continue
            from autoshard.graph_capture.overloads import is_harmless_call  # imports torch

            allowed = is_harmless_call(f"{namespace}.{name}", overload)
            require(allowed, f"the recipe of {recipe.paths[0]}: {target} {_MORE}")


def _check_op(graph: Graph, op: Op) -> None:
    try:
        bound(graph, op, rule_text(graph, op))
    except NoRule:
        return  # not with these arguments: every device repeats it
    except RuleError as error:
        raise GraphFault(f"op {op.name} ({op.target}): its shapes contradict each other: {error}") from None
    except CONTRADICTIONS as error:
        raise GraphFault(f"op {op.name} ({op.target}): its arguments do not fit the operator: {error}") from None


def _parsed(name: str, text: str) -> None:
    try:
        Rule.parse(text)
    except RuleError as error:
        raise GraphFault(f"op {name}: {error}") from None
