"""Convolutions and pooling: images keep their height and width whole."""

from __future__ import annotations

from autoshard.rules.kinds import Call, Local, LocalAttribute, Localise, LocaliseVariant, NoRule, RuleFor, term


def convolution(call: Call) -> str:
    """(g c) input channels, (g o) output channels in g groups; the kernel's dims k, the image's x and y are whole."""
    weight = call.shapes[1]
    assert weight is not None
    spatial = len(weight) - 2
    if call.rank != len(weight):
        raise NoRule
    groups = call.integer("groups", 1)
    channels, out = ("c", "o") if groups == 1 else ("(g c)", "(g o)")
    x, k, y = ([f"{name}{i}" for i in range(spatial)] for name in "xky")
    bias = f"+{out}" if len(call.shapes) > 2 and call.shapes[2] is not None else f"+{out}?"
    operands = f"b {channels} {term(x)}, {out} c {term(k)}, {bias}"
    return f"{operands} -> b {out} {term(y)} | sum: c | whole: {term(x + k + y)}"


def transposed(call: Call) -> str:
    """The mirror of a convolution: its weight holds (in, out / groups), so the output is summed over `c`."""
    weight = call.shapes[1]
    assert weight is not None
    spatial = len(weight) - 2
    if call.rank != len(weight):
        raise NoRule
    channels, out = ("c", "o") if call.integer("groups", 1) == 1 else ("(g c)", "(g o)")
    x, k, y = ([f"{name}{i}" for i in range(spatial)] for name in "xky")
    bias = f"+{out}" if len(call.shapes) > 2 and call.shapes[2] is not None else f"+{out}?"
    operands = f"b {channels} {term(x)}, {channels} o {term(k)}, {bias}"
    return f"{operands} -> b {out} {term(y)} | sum: c | whole: {term(x + k + y)}"


def pooling(call: Call) -> str:
    """Batch and channels stand alone; the image (two dims of a `max_pool2d`) is whole."""
    spatial = int(call.op.target.partition("pool")[2][0])
    x, y = ([f"{name}{i}" for i in range(spatial)] for name in "xy")
    results = ", ".join(f"... {term(y)}" for _ in call.results)
    return f"... {term(x)} -> {results} | whole: {term(x + y)}"


def localise_groups(local: Local) -> dict[str, LocalAttribute]:
    """With the groups cut, each device convolves its own; the weight holds (g o) of them."""
    return {"groups": local.factor("g")} if local.axes("g") else {}


CONVOLUTIONS = ["conv", "conv_transpose"]
POOLS = ["avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool"]
RULES: dict[str, str | RuleFor] = {
    **{f"aten.{name}{n}d": pooling for name in POOLS for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d_with_indices": pooling for n in (2, 3)},
    **{f"aten.conv{n}d": convolution for n in (1, 2, 3)},
    **{f"aten.conv_transpose{n}d": transposed for n in (1, 2, 3)},
}
LOCALISE: dict[str, Localise] = {f"aten.{name}{n}d": localise_groups for name in CONVOLUTIONS for n in (1, 2, 3)}
VARIANTS: dict[str, LocaliseVariant] = {}
