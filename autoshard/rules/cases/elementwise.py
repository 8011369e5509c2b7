"""Proof cases: elementwise operators."""

from __future__ import annotations

from autoshard.rules.proof.case_text import booleans, case, floats, integers, positive

UNARY = """
abs alias ceil cos erf erfc exp expm1 floor frac hardsigmoid hardswish isfinite isinf isnan log_sigmoid mish
neg positive relu relu6 round selu sigmoid sign signbit silu sin square tan tanh trunc
"""
POSITIVE = "log log10 log1p log2 reciprocal rsqrt sqrt"
BITS = "bitwise_and bitwise_or bitwise_xor"
ELEMENTWISE = [
    *(case(f"aten.{name}", floats((4, 5))) for name in UNARY.split()),
    *(case(f"aten.{name}", positive((5, 6))) for name in POSITIVE.split()),
    *(
        case(f"aten.{name}", floats((4, 5), (5,)))
        for name in ["minimum", "atan2", "fmod", "remainder", "ge", "le", "lt"]
    ),
    *(case(f"aten.{name}", (booleans((4, 5)), booleans((5,)))) for name in ["logical_or", "logical_xor"]),
    *(case(f"aten.{name}", (integers((4, 5), 9), integers((5,), 9))) for name in BITS.split()),
    case("aten.floor_divide", (integers((4, 5), 9), integers((5,), 9, 1))),
    case("aten.ne", (integers((4, 5), 3), integers((4, 1), 3))),
    case("aten.xlogy", positive((4, 5), (5,))),
    case("aten.bitwise_not", (integers((4, 5), 9),)),
    case("aten.logit", positive((4, 5)), eps=0.1),
    case("aten.celu", floats((4, 5)), alpha=1.5),
    case("aten.elu", floats((4, 5)), alpha=1, scale=1, input_scale=1),
    case("aten.softplus", floats((4, 5)), beta=2, threshold=20),
    case("aten.hardtanh", floats((4, 5)), min_val=-0.5, max_val=1),
    case("aten.clamp_min", floats((4, 5)), min=-0.5),
    case("aten.clamp_max", floats((4, 5)), max=0.5),
    case("aten.nan_to_num", floats((4, 5)), nan=None, posinf=None, neginf=None),
    case("aten.gelu", floats((4, 5)), approximate="tanh"),
    case("aten.leaky_relu", floats((4, 5)), negative_slope=0.1),
    case("aten.clamp", floats((4, 5)), min=-0.5, max=None),
    case("aten.add", floats((4, 5, 6), (4, 5, 6)), alpha=1),
    case("aten.add", floats((4, 5, 6), (6,)), alpha=2),
    case("aten.add", floats((4, 1, 6), (5, 1)), alpha=1),
    case("aten.add", floats((4, 5)), other=1.0, alpha=1),
    case("aten.add", (integers((4, 5), 9), integers((5,), 9)), alpha=1),
    case("aten.sub", floats((4, 5), (4, 5)), alpha=1),
    case("aten.rsub", floats((4, 5)), other=1.0, alpha=1),
    case("aten.mul", floats((4, 5, 6), (5, 1))),
    case("aten.mul", floats((4, 5)), other=0.5),
    case("aten.mul", (*floats((4, 5)), integers((5,), 9))),
    case("aten.div", (*floats((4, 5, 6)), *positive((4, 5, 1)))),
    case("aten.div", floats((4, 5)), other=3.0),
    case("aten.pow", floats((4, 5)), exponent=3.0),
    case("aten.pow", (*positive((4, 5)), *floats((4, 5)))),
    case("aten.addcdiv", (*floats((4, 5), (4, 5)), *positive((5,))), value=2),
    case("aten.to", floats((4, 5)), dtype="float64"),
    case("aten.to", (integers((4, 5), 9),), dtype="float64"),
    case("aten.maximum", floats((4, 5), (5,))),
    case("aten.where", (booleans((4, 5)), *floats((4, 5), (5,)))),
    case("aten.where", (booleans((5, 1)), *floats((4, 5, 6), (4, 5, 6)))),
    case("aten.masked_fill", (*floats((4, 5, 6)), booleans((5, 6))), value=0),
    case("aten.masked_fill", (*floats((4, 5, 6)), booleans((5, 6))), value=-1.0),
    case("aten.fill", floats((4, 5), ())),
    case("aten.fill", floats((4, 5)), value=2.0),
    case("aten.lerp", floats((4, 5), (4, 5)), weight=0.3),
    case("aten.addcmul", floats((4, 5), (4, 5), (5,)), value=2),
    case("aten.clone", floats((4, 5)), memory_format=None),
    case("aten.eq", (integers((4, 5), 3), integers((4, 1), 3))),
    case("aten.gt", floats((4, 5)), other=0.0),
    case("aten.logical_not", (booleans((4, 5)),)),
    case("aten.logical_and", (booleans((4, 5)), booleans((5,)))),
    case("aten.detach", floats((4, 5))),
]
