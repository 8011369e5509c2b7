"""Losses: a mean over cut rows is the local sum divided by the global count, so a variant."""

from __future__ import annotations

from math import prod

from autoshard.rules.kinds import Axes, Call, Local, LocalAttribute, Localise, LocaliseVariant, RuleFor, term

NONE, MEAN, SUM = 0, 1, 2  # torch's reduction argument


def cross_entropy(call: Call) -> str:
    """The mean counts labels that are not ignored, over all devices; cut classes exchange maximum and sum."""
    weighted = len(call.shapes) > 2 and call.shapes[2] is not None
    if call.integer("reduction", MEAN) != MEAN or weighted or _probabilities(call):
        return class_loss(call)
    rows = ["rows"] * (call.rank > 1) + [f"d{i}" for i in range(call.rank - 2)]
    dims = [*rows[:1], "vocabulary", *rows[1:]]
    absent = ", -" * (len(call.shapes) - 2)
    summed = f"sum: {' '.join(rows)} | " if rows else ""
    options = f"{summed}joined: vocabulary | empty: vocabulary | plain: vocabulary"
    variant = f"variant: parallel_cross_entropy {' '.join(dims)}"
    return f"{term(dims)}, {term(rows)}{absent} -> () | {options} | {variant}"


def class_loss(call: Call) -> str:
    """Plain losses over (rows, classes, ...): classes whole; rows too under a mean (its count is in the labels)."""
    rows = "rows " if call.rank > 1 else ""
    rest = " d*" if call.rank > 2 else ""
    names = ["rows"] * (call.rank > 1) + ["d"] * (call.rank > 2)
    target = f"{rows}c{rest}" if _probabilities(call) else f"{rows}{rest}".strip() or "()"
    weight = ", " + ("-" if call.shapes[2] is None else "c") if len(call.shapes) > 2 else ""
    text = f"{rows}c{rest}, {target}{weight} -> "
    reduction = call.integer("reduction", MEAN)
    if reduction == NONE:
        return f"{text}{' '.join([rows.strip(), rest.strip()]).strip() or '()'} | whole: c"
    if reduction == SUM:
        return text + ("() | " + (f"sum: {' '.join(names)} | " if names else "") + "whole: c")
    return f"{text}() | whole: {' '.join([*names, 'c'])}"


def _probabilities(call: Call) -> bool:
    return "int" not in (call.dtypes[1] or "")


def mse(call: Call) -> str:
    return {
        NONE: "..., ... -> ...",
        MEAN: "..., ... -> () | sum: ... | variant: parallel_mse_loss ...",
        SUM: "..., ... -> () | sum: ...",
    }[call.integer("reduction", MEAN)]


def localise_cross_entropy(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    facts = local.instance.operands[0]
    assert facts is not None
    given = dict(local.op.attributes)
    values: dict[str, LocalAttribute] = {
        "size": facts.shape[min(1, len(facts.shape) - 1)],
        "ignore_index": given.get("ignore_index", -100),
        "label_smoothing": given.get("label_smoothing", 0.0),
    }
    return values, (("rows", local.axes(*local.instance.rule.sum)), ("vocabulary", local.axes("vocabulary")))


def localise_mse(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    return {"count": prod(size for _, size in local.instance.sizes)}, ()


RULES: dict[str, str | RuleFor] = {
    "aten.cross_entropy_loss": cross_entropy,
    "aten.mse_loss": mse,
    "aten.nll_loss": class_loss,
    "aten.nll_loss_nd": class_loss,
}
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {
    "parallel_cross_entropy": localise_cross_entropy,
    "parallel_mse_loss": localise_mse,
}
