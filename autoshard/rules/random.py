"""Dropout: linear in its input. Its mask is a function of the global index, so it is a variant whenever it draws."""

from __future__ import annotations

from autoshard.graph.model import Graph, Op
from autoshard.rules.kinds import Axes, Call, Local, LocalAttribute, Localise, LocaliseVariant, RuleFor


def dropout(call: Call) -> str:
    draws = call.get("train") and call.get("p")
    return "... -> ... | linear: 0" + (" | variant: random_dropout" if draws else "")


def is_random(op: Op) -> bool:
    """Does the op draw a mask? Its ordinal among those that do is part of the mask's seed."""
    given = dict(op.attributes)
    if op.target == "aten.dropout":
        return bool(given.get("train") and given.get("p"))
    return op.target == "aten.scaled_dot_product_attention" and bool(given.get("dropout_p"))


def random_index(graph: Graph, op: Op) -> int:
    """Ordinal of a random op in execution order."""
    return [other.name for other in graph.ops if is_random(other)].index(op.name)


def localise_dropout(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    shape, layout = local.instance.results[0].shape, str(local.strategy.results[0])
    index = random_index(local.graph, local.op)
    return {"p": local.op.attribute("p"), "index": index, "shape": shape, "layout": layout}, ()


RULES: dict[str, str | RuleFor] = {"aten.dropout": dropout}
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {"random_dropout": localise_dropout}
