"""Softmax and the norms: what they normalise over is whole."""

from __future__ import annotations

from autoshard.rules.kinds import Call, Local, LocalAttribute, Localise, LocaliseVariant, RuleFor, letters, term


def over_dim(call: Call) -> str:
    """One dim is whole: softmax, cumulative sums, sorts."""
    dims = letters(call.rank)
    if not dims:
        return "() -> " + ", ".join("()" for _ in call.results)
    results = ", ".join(term(dims) for _ in call.results)
    return f"{term(dims)} -> {results} | whole: {dims[call.dim()]}"


def batch_norm(call: Call) -> str:
    """With running statistics every channel stands alone; with batch statistics only the channels can be cut."""
    present = ["c?" if shape is None else "c" for shape in call.shapes[1:]]
    statistics = ", c" * (len(call.results) - 1)
    batch = bool(call.get("training")) or (len(call.shapes) > 3 and call.shapes[3] is None)
    dims = "b c" + " d*" * (call.rank > 2)
    whole = " | whole: b" + " d" * (call.rank > 2) if batch else ""
    return f"{dims}, {', '.join(present)} -> {dims}{statistics}{whole}"


def group_norm(call: Call) -> str:
    """Samples and groups stand alone; the channels of a group are together."""
    groups = call.integer("num_groups", 1)
    channels = f"(g {call.shape[1] // groups})"
    weights = ["-" if shape is None else channels for shape in call.shapes[1:]]
    rest = " d*" if call.rank > 2 else ""
    return f"{', '.join([f'b {channels}{rest}', *weights])} -> b {channels}{rest}" + (" | whole: d" if rest else "")


def localise_group_norm(local: Local) -> dict[str, LocalAttribute]:
    return {"num_groups": local.factor("g")} if local.axes("g") else {}


RULES: dict[str, str | RuleFor] = {
    "aten._log_softmax": over_dim,
    "aten._softmax": over_dim,
    "aten.batch_norm": batch_norm,
    "aten.group_norm": group_norm,
    "aten.layer_norm": "... d*, d*?, d*? -> ... d* | whole: d",
    "aten.log_softmax": over_dim,
    "aten.rms_norm": "... d*, d*? -> ... d* | whole: d",
    "aten.softmax": over_dim,
}
LOCALISE: dict[str, Localise] = {"aten.group_norm": localise_group_norm}
VARIANTS: dict[str, LocaliseVariant] = {}
