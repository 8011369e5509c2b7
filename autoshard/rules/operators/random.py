"""Random operators: draws are a function of the global position, so each is a variant that draws its part."""

from __future__ import annotations

from autoshard.ir.graph import Op, Tensor
from autoshard.ir.layout import REPLICATE, Layout, Shard
from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    OperatorCall,
    letters,
    term,
)
from autoshard.rules.algebra.operator_record import ALWAYS, Operator, each
from autoshard.rules.algebra.saved_for_backward import Kept, Operands
from autoshard.rules.algebra.variant_record import OperatorVariant


def dropout(call: OperatorCall) -> str:
    """Rule of dropout, linear in its input."""
    draws = call.get("train") and call.get("p")
    return "... -> ... | linear: 0" + (" | variant: random_dropout" if draws else "")


def noise(call: OperatorCall) -> str:
    """Rule of noise: whole features, or with an offset that keeps the mean (`alpha`: affine)."""
    linear = "" if "alpha" in call.op.target else " | linear: 0"
    draws = call.get("train") and call.get("p")
    return f"... -> ...{linear}" + (" | variant: random_noise" if draws else "")


def creation_rule(call: OperatorCall) -> str:
    """Rule of a tensor made from nothing: any dim can be sharded."""
    return f"-> {term(letters(len(call.results[0])))} | variant: random_tensor"


def multinomial(call: OperatorCall) -> str:
    """Rule of multinomial: rows stand alone."""
    rows = letters(call.rank - 1)
    ends = (str(call.shape[-1]), str(call.results[0][-1]))
    weights, chosen = (term([*rows, end]) for end in ends)
    return f"{weights} -> {chosen} | variant: random_multinomial"


def _where(local: Local) -> dict[str, LocalAttribute]:
    """Identity of a draw: its ordinal, the global shape and layout of the (first) result."""
    shape, layout = local.instance.results[0].shape, str(local.strategy.results[0])
    return {"index": local.drawn, "shape": shape, "layout": layout}


def localise_dropout(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    return {"p": local.op.attribute("p"), **_where(local)}, ()


def localise_noise(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    """Arguments of noise. Features are (sample, channel): the rest of the image shares one number, however sharded."""
    shape, layout = local.instance.results[0].shape, local.strategy.results[0]
    if "feature" in local.op.target:
        shape = (*shape[:2], *[1] * (len(shape) - 2))
        layout = Layout(tuple(REPLICATE if isinstance(p, Shard) and p.dim > 1 else p for p in layout.placements))
    values = {"p": local.op.attribute("p"), "alpha": "alpha" in local.op.target}
    return {**values, **_where(local), "shape": shape, "layout": str(layout)}, ()


def localise_draw(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    attributes = {name: value for name, value in local.op.attributes if value is not None and name != "size"}
    return {**attributes, **_where(local)}, ()


def localise_multinomial(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    """Arguments with the weights' shape, not that of the drawn indices."""
    weights = local.instance.operands[0]
    assert weights is not None
    values, axes = localise_draw(local)
    return {**values, "shape": weights.shape}, axes


def dropout_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Mask of a byte per element."""
    return (), (), results[0].numel


OPERATORS: dict[str, Operator] = {
    **each(
        "alpha_dropout feature_alpha_dropout feature_dropout", Operator(rule=noise, in_torch=True, draws=("train", "p"))
    ),
    "aten.bernoulli": Operator(rule="... -> ... | variant: random_bernoulli", in_torch=True, draws=ALWAYS),
    "aten.dropout": Operator(
        rule=dropout,
        saves=dropout_saves,
        order="operand",
        bandwidth="softmax",
        spelling="F.dropout({0}, {p}, training={train})",
        draws=("train", "p"),
    ),
    "aten.multinomial": Operator(rule=multinomial, in_torch=True, draws=ALWAYS),
    **each("rand_like randint_like randn_like", Operator(no_gradient=True)),
    "autoshard.random": Operator(rule=creation_rule, draws=ALWAYS),
}
VARIANTS: dict[str, OperatorVariant] = {
    "random_bernoulli": OperatorVariant(localise=localise_draw),
    "random_dropout": OperatorVariant(localise=localise_dropout),
    "random_multinomial": OperatorVariant(localise=localise_multinomial),
    "random_noise": OperatorVariant(localise=localise_noise),
    "random_tensor": OperatorVariant(localise=localise_draw),
}
