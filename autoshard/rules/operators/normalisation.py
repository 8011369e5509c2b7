"""Softmax and the norms: what they normalise over is whole, or cut where a variant joins the statistics."""

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
    integers,
    letters,
    term,
)


def over_dim(call: OperatorCall) -> str:
    """One dim is whole: cumulative sums, sorts."""
    dims = letters(call.rank)
    if not dims:
        return "() -> " + ", ".join("()" for _ in call.results)
    results = ", ".join(term(dims) for _ in call.results)
    return f"{term(dims)} -> {results} | whole: {dims[call.dim()]}"


def softmax(call: OperatorCall) -> str:
    """Along a cut dim the maxima and sums of all devices are joined."""
    dims = letters(call.rank)
    if not dims:
        return "() -> ()"
    own = dims[call.dim()]
    name = "parallel_log_softmax" if "log_softmax" in call.op.target else "parallel_softmax"
    return f"{term(dims)} -> {term(dims)} | plain: {own} | variant: {name} {own}"


def batch_norm(call: OperatorCall) -> str:
    """With running statistics every channel stands alone; with those of the batch, a cut batch joins them."""
    present = ["c?" if shape is None else "c" for shape in call.shapes[1:]]
    statistics = ", c" * (len(call.results) - 1)
    batch = bool(call.get("training")) or (len(call.shapes) > 3 and call.shapes[3] is None)
    rest = " d*" if call.rank > 2 else ""
    own = "b" + rest.replace("*", "")
    joined = f" | joined: {own}" if statistics else ""
    variant = f"{joined} | plain: {own} | variant: synchronised_batch_norm {own}" if batch else ""
    return f"b c{rest}, {', '.join(present)} -> b c{rest}{statistics}{variant}"


def group_norm(call: OperatorCall) -> str:
    """Samples and groups stand alone; cut positions, or channels of the only group, join the statistics."""
    groups = call.integer("num_groups", 1)
    channels = f"(g {call.shape[1] // groups})" if groups > 1 else "c"
    weights = ["-" if shape is None else channels for shape in call.shapes[1:]]
    rest = " d*" if call.rank > 2 else ""
    own = ("c" if groups == 1 else "") + rest.replace("*", "")
    variant = f" | plain: {own.strip()} | variant: parallel_group_norm {own.strip()}" if own else ""
    return f"{', '.join([f'b {channels}{rest}', *weights])} -> b {channels}{rest}{variant}"


def localise_parallel_group_norm(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    x = local.instance.operands[0]
    assert x is not None
    groups = local.op.attribute("num_groups")
    assert isinstance(groups, int)
    cut = local.instance.rule.variant_factors
    values: dict[str, LocalAttribute] = {
        "groups": local.factor("g") if local.axes("g") else groups,
        "count": prod(x.shape[1:]) // groups,
        "eps": local.op.attribute("eps"),
    }
    return values, (("features", local.axes(*cut)),)


def localise_norm(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    sizes = integers(local.op.attribute("normalized_shape"))
    values: dict[str, LocalAttribute] = {"dims": len(sizes), "count": prod(sizes)}
    eps = dict(local.op.attributes).get("eps")
    return {**values, "eps": eps}, (("features", local.axes(*local.instance.rule.variant_factors)),)


def localise_softmax(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    given, x = dict(local.op.attributes), local.instance.operands[0]
    assert x is not None and isinstance(given["dim"], int)
    wide = "float32" if given.get("half_to_float") else given.get("dtype")
    classes = local.axes(*local.instance.rule.variant_factors)
    return {"dim": given["dim"] % len(x.shape), "dtype": wide}, (("classes", classes),)


def localise_batch_norm(local: Local) -> tuple[dict[str, LocalAttribute], Axes]:
    x, given = local.instance.operands[0], dict(local.op.attributes)
    assert x is not None
    values: dict[str, LocalAttribute] = {"count": x.shape[0] * prod(x.shape[2:])}
    values |= {"momentum": given.get("momentum", 0.1), "eps": given.get("eps", 1e-5)}
    return values, (("batch", local.axes(*local.instance.rule.variant_factors)),)


def localise_group_norm(local: Local) -> dict[str, LocalAttribute]:
    return {"num_groups": local.factor("g")} if local.axes("g") else {}


def weight_norm(call: OperatorCall) -> str:
    """Direction, magnitude: each index along the dim has a norm of its own, over all other dims."""
    names, dim = letters(call.rank), call.get("dim")
    if not isinstance(dim, int) or dim == -1 or call.shapes[1] is None or len(call.shapes[1]) != call.rank:
        raise NoRule  # -1 is one norm over everything
    own = names[dim % call.rank]
    whole = [name for name in names if name != own]
    magnitude = [own if name == own else "1" for name in names]
    return f"{term(names)}, {term(magnitude)} -> {term(names)} | whole: {' '.join(whole)} | linear: 1"


RULES: dict[str, str | RuleFor] = {
    "aten._log_softmax": softmax,
    "aten._softmax": softmax,
    "aten._weight_norm": weight_norm,
    "aten.batch_norm": batch_norm,
    "aten.group_norm": group_norm,
    "aten.layer_norm": "... d*, d*?, d*? -> ... d* | plain: d | variant: parallel_layer_norm d",
    "aten.log_softmax": softmax,
    "aten.rms_norm": "... d*, d*? -> ... d* | plain: d | variant: parallel_rms_norm d",
    "aten.softmax": softmax,
}
LOCALISE: dict[str, Localise] = {"aten.group_norm": localise_group_norm}
VARIANTS: dict[str, LocaliseVariant] = {
    "parallel_group_norm": localise_parallel_group_norm,
    "parallel_layer_norm": localise_norm,
    "parallel_log_softmax": localise_softmax,
    "parallel_rms_norm": localise_norm,
    "parallel_softmax": localise_softmax,
    "synchronised_batch_norm": localise_batch_norm,
}
