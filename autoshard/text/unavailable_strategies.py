"""Splits that an operator is not offered on a mesh, in a reader's words, each with the reason."""

from __future__ import annotations

from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.rules import explain, instance
from autoshard.rules.algebra.strategy import Choice
from autoshard.rules.granularities import Granularities
from autoshard.text.plan_labels import dim_words


def unavailable_strategies(graph: Graph, op: Op, mesh: Mesh, granularities: Granularities) -> list[str]:
    """`heads split over tp: some device would hold nothing: 12 units over 5 devices`, a line for each split and reason.

    Of splits over one axis, and of dims that no axis may split; combinations of axes are left out.
    """
    axes_of: dict[tuple[str, str], list[str]] = {}
    for text, reason in explain(graph, op, mesh, granularities):
        choice_text, _, axis = text.partition("@")
        if text == op.target:
            axes_of.setdefault(("any split", reason), [])
        elif " " in text or (axis and mesh.axis_size(axis) == 1):
            continue
        else:
            choice = Choice.parse(choice_text)
            if choice.kind == "factor":
                words = _words(graph, op, choice.factor) + _refined(choice)
                axes = axes_of.setdefault((words, reason.removeprefix(f"{choice.factor}: ")), [])
                axes += [axis] if axis and axis not in axes else []
    return [
        f"{words} over {' or '.join(axes)}: {reason}" if axes else f"{words}: {reason}"
        for (words, reason), axes in axes_of.items()
    ]


def _refined(choice: Choice) -> str:
    if isinstance(choice.unit, tuple):
        return f" in parts of {', '.join(map(str, choice.unit))}"
    blocks = f" in each of {choice.blocks} blocks" if choice.blocks > 1 else ""
    return blocks + (f" in units of {choice.unit}" if choice.unit > 1 else "")


def _words(graph: Graph, op: Op, factor: str) -> str:
    """What a reader calls a split of the factor: by the first operand or result that has it."""
    rule = instance(graph, op).rule
    terms = [*zip(op.operands, rule.operands, strict=False), *zip(op.results, rule.results, strict=False)]
    for position, (name, term) in enumerate(terms):
        for dim, part in enumerate(term.dims if term is not None and name is not None else ()):
            if factor in part.factors:
                assert name is not None
                return dim_words(op, position, dim, name, graph)
    return f"split of {factor}"
