"""Does a graph that was read from a file hold together? Its operators against their rules; torch is asked only about
those that have none.
"""

from __future__ import annotations

from autoshard.errors import InvalidFileError
from autoshard.ir.graph import OPTIMIZERS, PRECISIONS, Graph, Op
from autoshard.ir.graph_fault import GraphFault, require
from autoshard.rules.algebra.argument_rules import NoRule
from autoshard.rules.algebra.notation import Rule, RuleError
from autoshard.rules.operator_table import CONTRADICTIONS, bound, depends_on_nothing, rule_text
from autoshard.rules.operators import record


def check_saved(graph: Graph, where: str) -> Graph:
    """The graph; InvalidFileError where the file `where` contradicts itself."""
    try:
        check_rules(graph)
    except GraphFault as error:
        hint = "make it again with `autoshard trace MODEL -o FILE`"
        raise InvalidFileError(f"{where} is damaged: {error}", hint) from None
    return graph


def check_rules(graph: Graph) -> None:
    """GraphFault names the first operator whose shapes or arguments contradict its rule, or what can't be planned."""
    require(graph.outputs, "it has no outputs: nothing would be computed")
    require(graph.loss is None or graph.loss in graph.outputs, f"the loss {graph.loss} is no output")
    require(graph.precision in PRECISIONS, f"the precision is {graph.precision!r}: expected {', '.join(PRECISIONS)}")
    require(graph.optimizer in OPTIMIZERS, f"the optimizer is {graph.optimizer!r}: expected {', '.join(OPTIMIZERS)}")
    for name, text in graph.discovered:
        require(name in graph.by_op, f"a rule was discovered for op {name}, which there is not")
        if text:
            _parsed(name, text)
    for op in graph.ops:
        require(_is_known(op.target), f"op {op.name}: there is no operator {op.target}")
        if not depends_on_nothing(graph, op):
            _check_op(graph, op)


def _is_known(target: str) -> bool:
    """Those of other namespaces are registered by code that a graph only names."""
    namespace = target.partition(".")[0]
    known = record(target)
    if known.rule is not None or known.repeated or namespace not in ("aten", "autoshard"):
        return True
    from autoshard.graph_capture.overloads import is_operator  # imports torch

    return namespace == "aten" and is_operator(target)


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
