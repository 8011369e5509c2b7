"""Operators on images other than convolutions: resizing, shuffles of pixels, samples at given points, patches."""

from __future__ import annotations

from autoshard.rules.algebra.argument_rules import (
    Local,
    LocalAttribute,
    NoRule,
    OperatorCall,
    letters,
    term,
)
from autoshard.rules.algebra.operator_record import Operator, each
from autoshard.rules.algebra.saved_for_backward import NOTHING
from autoshard.rules.algebra.variant_record import temporaries


def resize(call: OperatorCall) -> str:
    """Rule of resizing: whole repeats of each pixel keep blocks apart; other ways need the neighbours."""
    nearest = "nearest" in call.op.target
    image, result = ["b", "c"], ["b", "c"]
    for i, (size, length) in enumerate(zip(call.shape[2:], call.results[0][2:], strict=True)):
        apart = nearest and length % size == 0
        image.append(f"y{i}" if apart else str(size))
        result.append(str(length) if not apart else f"y{i}" if length == size else f"(y{i} {length // size})")
    return f"{term(image)} -> {term(result)} | linear: 0"


def localise_resize(local: Local) -> dict[str, LocalAttribute]:
    """Local size of the result, if it is an argument."""
    attributes = dict(local.op.attributes)
    return {"output_size": local.result()[2:]} if attributes.get("output_size") is not None else {}


def pixel_shuffle(call: OperatorCall) -> str:
    factor = call.integer("upscale_factor", call.integer("downscale_factor", 1))
    fine, coarse = f"(h {factor}) (w {factor})", f"(c {factor} {factor}) h w"
    sides = (coarse, f"c {fine}") if "upscale_factor" in dict(call.op.attributes) else (f"c {fine}", coarse)
    return f"... {sides[0]} -> ... {sides[1]} | linear: 0"


def patches(call: OperatorCall) -> str:
    """Rule (b, c h w) -> (b, c k, places): every patch of a channel."""
    if call.rank != 4:
        raise NoRule
    kernel = call.results[0][1] // call.shape[1]
    return f"b c {call.shape[2]} {call.shape[3]} -> b (c {kernel}) {call.results[0][2]} | linear: 0"


def joined_patches(call: OperatorCall) -> str:
    """Rule (b, c k, places) -> (b, c, h w): the sum of every patch of a channel, each where it lies."""
    if call.rank != 3:
        raise NoRule
    _, channels, height, width = call.results[0]
    return f"b (c {call.shape[1] // channels}) {call.shape[2]} -> b c {height} {width} | linear: 0"


def sample(call: OperatorCall) -> str:
    """Rule of sampling: the image is whole, the points are independent."""
    spatial = call.rank - 2
    x, y = ([f"{name}{i}" for i in range(spatial)] for name in "xy")
    return f"b c {term(x)}, b {term(y)} {spatial} -> b c {term(y)} | whole: {term(x)}"


def instance_norm(call: OperatorCall) -> str:
    """Rule of instance norm: channels and samples are independent; each image is whole."""
    if any(shape is not None for shape in call.shapes[3:]):
        raise NoRule  # running statistics are means over samples
    weights = ["-" if shape is None else "c" for shape in call.shapes[1:]]
    spatial = [f"d{i}" for i in range(call.rank - 2)]
    dims = term(["b", "c", *spatial])
    return f"{', '.join([dims, *weights])} -> {dims}" + (f" | whole: {term(spatial)}" if spatial else "")


def prelu(call: OperatorCall) -> str:
    names = letters(call.rank)
    weight = call.shapes[1]
    assert weight is not None
    weight_term = "1" if weight == (1,) else "()" if weight == () else names[1]
    return f"{term(names)}, {weight_term} -> {term(names)}"


OPERATORS: dict[str, Operator] = {
    "aten.col2im": Operator(rule=joined_patches, saves=NOTHING),
    "aten.grid_sampler": Operator(rule=sample, autocast="widest", in_torch=True),
    "aten.im2col": Operator(rule=patches),
    "aten.instance_norm": Operator(
        rule=instance_norm,
        first_decides_dtype=True,
        spelling="F.instance_norm({0}<running_mean:3><running_var:4><weight:1><bias:2><use_input_stats=True><momentum=0.1><eps=1e-05>)",
    ),
    "aten.pixel_shuffle": Operator(rule=pixel_shuffle, spelling="F.pixel_shuffle({0}, {upscale_factor})"),
    "aten.pixel_unshuffle": Operator(rule=pixel_shuffle, spelling="F.pixel_unshuffle({0}, {downscale_factor})"),
    "aten.prelu": Operator(rule=prelu, autocast="low", holds=temporaries({0: 1, 1: 0}), spelling="F.prelu({0}, {1})"),
    **each(
        "upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
        "upsample_trilinear3d",
        Operator(rule=resize, localise=localise_resize, autocast="high"),
    ),
    "aten._upsample_bicubic2d_aa": Operator(autocast="high"),
    "aten._upsample_bilinear2d_aa": Operator(autocast="high"),
}
