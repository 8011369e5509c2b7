"""Losses: a mean over cut rows is the local sum divided by the global count (or the labels' weights), so a variant."""

from __future__ import annotations

from math import prod

from autoshard.rules.algebra.argument_rules import (
    Axes,
    Local,
    LocalAttribute,
    Localise,
    LocaliseVariant,
    NoRule,
    OperatorCall,
    RuleFor,
    term,
)

NONE, MEAN, SUM = 0, 1, 2  # torch's reduction argument
REDUCTIONS = ("none", "mean", "sum")


def cross_entropy(call: OperatorCall) -> str:
    """Cut classes exchange maximum and sum; a mean counts labels that are not ignored, over all devices."""
    if _probabilities(call):
        return soft_labels(call)
    return _classes(call, "joined", "parallel_cross_entropy")


def nll(call: OperatorCall) -> str:
    """Only the device that holds a label's class adds to the loss."""
    return _classes(call, "sum", "parallel_nll_loss")


def _classes(call: OperatorCall, classes: str, variant: str) -> str:
    """(rows, classes, ...), labels, weights of the classes. Without a mean, only cut classes need the variant."""
    rows = ["rows"] * (call.rank > 1) + [f"d{i}" for i in range(call.rank - 2)]
    dims = [*rows[:1], "vocabulary", *rows[1:]]
    reduction = call.integer("reduction", MEAN)
    operands = [term(dims), term(rows), *("-" if shape is None else "vocabulary" for shape in call.shapes[2:])]
    summed = ([] if reduction == NONE else rows) + ["vocabulary"] * (classes == "sum")
    options = [f"sum: {' '.join(summed)}"] * bool(summed) + ["joined: vocabulary"] * (classes == "joined")
    options += ["empty: vocabulary", "plain: vocabulary"]
    own = dims if reduction == MEAN else ["vocabulary"]
    result = term(rows) if reduction == NONE else "()"
    return " | ".join([f"{', '.join(operands)} -> {result}", *options, f"variant: {variant} {' '.join(own)}"])


def soft_labels(call: OperatorCall) -> str:
    """Labels that are probabilities: (rows, classes, ...) both; classes whole; a mean is over rows."""
    rows = ["rows"] * (call.rank > 1) + [f"d{i}" for i in range(call.rank - 2)]
    dims = term([*rows[:1], "c", *rows[1:]])
    reduction = call.integer("reduction", MEAN)
    operands = [dims, dims, *("-" if shape is None else "c" for shape in call.shapes[2:])]
    if reduction == NONE:
        return f"{', '.join(operands)} -> {term(rows)} | whole: c"
    summed = f" | sum: {' '.join(rows)}" if rows else ""
    variant = f" | variant: parallel_loss {' '.join(rows)}" if rows and reduction == MEAN else ""
    return f"{', '.join(operands)} -> ()  | whole: c{summed}{variant}"


def _probabilities(call: OperatorCall) -> bool:
    return "int" not in (call.dtypes[1] or "")


def mse(call: OperatorCall) -> str:
    return {
        NONE: "..., ... -> ...",
        MEAN: "..., ... -> () | sum: ... | variant: parallel_mse_loss ...",
        SUM: "..., ... -> () | sum: ...",
    }[call.integer("reduction", MEAN)]


def elementwise(call: OperatorCall) -> str:
    """One number an element, weights broadcast."""
    if any(len(shape or ()) > call.rank for shape in call.shapes):
        raise NoRule
    operands = ", ".join("-" if shape is None else "..." for shape in call.shapes)
    return {
        NONE: f"{operands} -> ...",
        MEAN: f"{operands} -> () | sum: ... | variant: parallel_loss ...",
        SUM: f"{operands} -> () | sum: ...",
    }[call.integer("reduction", MEAN)]


def embedding_pairs(call: OperatorCall) -> str:
    """One number a row of (rows, d), whose size d is whole."""
    if call.rank != 2 or len(call.shapes[2] or ()) != 1:
        raise NoRule
    return {
        NONE: "rows d, rows d, rows -> rows | whole: d",
        MEAN: "rows d, rows d, rows -> () | sum: rows | whole: d | variant: parallel_loss rows",
        SUM: "rows d, rows d, rows -> () | sum: rows | whole: d",
    }[call.integer("reduction", MEAN)]


def localise_classes(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    facts = local.instance.operands[0]
    assert facts is not None
    given = dict(local.op.attributes)
    reduction = given.get("reduction", MEAN)
    assert isinstance(reduction, int)
    values: dict[str, LocalAttribute] = {
        "size": facts.shape[min(1, len(facts.shape) - 1)],
        "ignore_index": given.get("ignore_index", -100),
    }
    if reduction != MEAN:
        values["reduction"] = REDUCTIONS[reduction]
    if local.op.target == "aten.cross_entropy_loss":
        values["label_smoothing"] = given.get("label_smoothing", 0.0)
    rows = tuple(factor for factor in local.instance.rule.factors if factor != "vocabulary")
    cut = local.axes(*rows) if reduction == MEAN else ()
    return values, (("rows", cut), ("vocabulary", local.axes("vocabulary")))


def localise_mse(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    return {"count": prod(size for _, size in local.instance.sizes)}, ()


def localise_loss(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    """What the mean is over: all elements, or all rows where a loss is one number a row."""
    given = {name: value for name, value in local.op.attributes if name != "reduction"}
    count = prod(local.instance.size[factor] for factor in local.instance.rule.sum)
    return {"loss": local.op.target.removeprefix("aten."), "count": count, **given}, ()


ELEMENTWISE = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss", "huber_loss", "kl_div",
    "l1_loss", "margin_ranking_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
)  # fmt: skip
RULES: dict[str, str | RuleFor] = {
    "aten.cross_entropy_loss": cross_entropy,
    "aten.mse_loss": mse,
    "aten.nll_loss": nll,
    "aten.nll_loss_nd": nll,
    "aten.cosine_embedding_loss": embedding_pairs,
    **{f"aten.{name}": elementwise for name in ELEMENTWISE},
}
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {
    "parallel_cross_entropy": localise_classes,
    "parallel_nll_loss": localise_classes,
    "parallel_loss": localise_loss,
    "parallel_mse_loss": localise_mse,
}
