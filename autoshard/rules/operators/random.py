"""Random operators: what is drawn is a function of the global position, so each is a variant that draws its part."""

from __future__ import annotations

from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import REPLICATE, Layout, Shard
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    Localise,
    LocaliseVariant,
    OperatorCall,
    RuleFor,
    letters,
    term,
)

_DROPS = ("aten.dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout", "aten.feature_dropout")
_DRAWS = ("autoshard.random", "aten.bernoulli", "aten.multinomial")


def dropout(call: OperatorCall) -> str:
    """Linear in its input."""
    draws = call.get("train") and call.get("p")
    return "... -> ... | linear: 0" + (" | variant: random_dropout" if draws else "")


def noise(call: OperatorCall) -> str:
    """Whole features, or with an offset that keeps the mean (`alpha`: affine)."""
    linear = "" if "alpha" in call.op.target else " | linear: 0"
    return f"... -> ...{linear}" + (" | variant: random_noise" if is_random(call.op) else "")


def made(call: OperatorCall) -> str:
    """Made from nothing: any dim can be cut."""
    return f"-> {term(letters(len(call.results[0])))} | variant: random_tensor"


def multinomial(call: OperatorCall) -> str:
    """Rows stand alone."""
    rows = letters(call.rank - 1)
    ends = (str(call.shape[-1]), str(call.results[0][-1]))
    weights, chosen = (term([*rows, end]) for end in ends)
    return f"{weights} -> {chosen} | variant: random_multinomial"


def is_random(op: Op) -> bool:
    """Does the op draw? Its ordinal among those that do is part of the seed."""
    given = dict(op.attributes)
    if op.target in _DROPS:
        return bool(given.get("train") and given.get("p"))
    return op.target in _DRAWS or (op.target == "aten.scaled_dot_product_attention" and bool(given.get("dropout_p")))


def random_index(graph: Graph, op: Op) -> int:
    """Ordinal of a random op in execution order."""
    return _ordinals(graph)[op.name]


_recent: list[tuple[Graph, dict[str, int]]] = []  # of the last graph that was asked about


def _ordinals(graph: Graph) -> dict[str, int]:
    if not _recent or _recent[0][0] is not graph:
        drawing = [op.name for op in graph.ops if is_random(op)]
        _recent[:] = [(graph, {name: ordinal for ordinal, name in enumerate(drawing)})]
    return _recent[0][1]


def _where(local: Local) -> dict[str, LocalAttribute]:
    """What is drawn: the ordinal, the global shape and layout of the (first) result."""
    shape, layout = local.instance.results[0].shape, str(local.strategy.results[0])
    return {"index": random_index(local.graph, local.op), "shape": shape, "layout": layout}


def localise_dropout(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    return {"p": local.op.attribute("p"), **_where(local)}, ()


def localise_noise(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    """Features are (sample, channel): the rest of the image shares one number, however it is cut."""
    shape, layout = local.instance.results[0].shape, local.strategy.results[0]
    if "feature" in local.op.target:
        shape = (*shape[:2], *[1] * (len(shape) - 2))
        layout = Layout(tuple(REPLICATE if isinstance(p, Shard) and p.dim > 1 else p for p in layout.placements))
    values = {"p": local.op.attribute("p"), "alpha": "alpha" in local.op.target}
    return {**values, **_where(local), "shape": shape, "layout": str(layout)}, ()


def localise_given(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    given = {name: value for name, value in local.op.attributes if value is not None and name != "size"}
    return {**given, **_where(local)}, ()


def localise_multinomial(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    """The weights' shape, not that of what is chosen."""
    weights = local.instance.operands[0]
    assert weights is not None
    values, axes = localise_given(local)
    return {**values, "shape": weights.shape}, axes


RULES: dict[str, str | RuleFor] = {
    "autoshard.random": made,
    "aten.alpha_dropout": noise,
    "aten.bernoulli": "... -> ... | variant: random_bernoulli",
    "aten.dropout": dropout,
    "aten.feature_alpha_dropout": noise,
    "aten.feature_dropout": noise,
    "aten.multinomial": multinomial,
}
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {
    "random_bernoulli": localise_given,
    "random_dropout": localise_dropout,
    "random_multinomial": localise_multinomial,
    "random_noise": localise_noise,
    "random_tensor": localise_given,
}
