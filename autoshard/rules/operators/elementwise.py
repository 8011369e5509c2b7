"""Operators that work on every element alone, with broadcasting."""

from __future__ import annotations

from autoshard.rules.algebra.argument_rules import Localise, LocaliseVariant, OperatorCall, RuleFor

UNARY = """
abs bitwise_not ceil celu clamp clamp_max clamp_min cos elu erf erfc exp expm1 floor frac gelu hardsigmoid hardswish
hardtanh isfinite isinf isnan leaky_relu log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num reciprocal
relu relu6 round rsqrt rsub selu sigmoid sign signbit silu sin softplus sqrt square tan tanh trunc
"""
BINARY = """
__and__ __or__ __xor__ atan2 bitwise_and bitwise_or bitwise_xor eq floor_divide fmod ge gt le logical_and logical_or
logical_xor lt maximum minimum ne pow remainder xlogy
"""
LINEAR = "_to_copy alias clone contiguous neg positive"


def elementwise(call: OperatorCall) -> str:
    """`..., ... -> ...`, as many operands as there are."""
    return ", ".join("-" if shape is None else "..." for shape in call.shapes) + " -> ..."


def add(call: OperatorCall) -> str:
    """A sum passes partial values in both operands together; `x + 1` is affine, and does not."""
    return elementwise(call) + (" | linear: 0+1" if len(call.shapes) == 2 else "")


def mul(call: OperatorCall) -> str:
    return elementwise(call) + (" | linear: 0, 1" if len(call.shapes) == 2 else " | linear: 0")


def div(call: OperatorCall) -> str:
    affine = call.get("rounding_mode") is not None or call.get("self") is not None
    return elementwise(call) + ("" if affine else " | linear: 0")


def where(call: OperatorCall) -> str:
    return elementwise(call) + (" | linear: 1+2" if len(call.shapes) == 3 else "")


def masked_fill(call: OperatorCall) -> str:
    return elementwise(call) + (" | linear: 0" if call.get("value") == 0 else "")


def cast(call: OperatorCall) -> str:
    """`to` a dtype, or that of another tensor, of which only the dtype counts: any part of it will do."""
    other = ", o*" if len(call.shapes) == 2 and call.shapes[1] else ", ()" if len(call.shapes) == 2 else ""
    return f"...{other} -> ..." + (" | whole: o" if other == ", o*" else "") + " | linear: 0"


def fill(call: OperatorCall) -> str:
    """Its result has the shape of operand 0 and the value of operand 1 or of an argument."""
    return elementwise(call)


def lerp(call: OperatorCall) -> str:
    return elementwise(call) + " | linear: 0+1"


RULES: dict[str, str | RuleFor] = {
    **{f"aten.{name}": elementwise for name in (UNARY + BINARY).split()},
    **{f"aten.{name}": "... -> ... | linear: 0" for name in LINEAR.split()},
    "aten.add": add,
    "aten.addcdiv": elementwise,
    "aten.addcmul": elementwise,
    "aten.detach": "... -> ...",
    "aten.div": div,
    "aten.fill": fill,
    "aten.lerp": lerp,
    "aten.masked_fill": masked_fill,
    "aten.mul": mul,
    "aten.sub": add,
    "aten.to": cast,
    "aten.true_divide": div,
    "aten.type_as": cast,
    "aten.where": where,
}
LOCALISE: dict[str, Localise] = {}
VARIANTS: dict[str, LocaliseVariant] = {}
