"""Operators that work on every element alone, with broadcasting."""

from __future__ import annotations

from autoshard.ir.graph import Op, Tensor
from autoshard.ir.local_op import LocalOp
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import OperatorCall, linear_factors
from autoshard.rules.algebra.operator_record import CodeWriter, Given, Names, Operator, Work, each, with_formulas
from autoshard.rules.algebra.saved_for_backward import (
    FACTORS,
    FIRST,
    NOTHING,
    RESULT,
    Kept,
    Operands,
    keeps,
    needs_grad,
)
from autoshard.rules.algebra.variant_record import Formulas, Layouts, LocalTensors, Temporary, temporaries
from autoshard.rules.algebra.view_strides import same


def elementwise(call: OperatorCall) -> str:
    """Rule `..., ... -> ...`, with as many operands as there are."""
    return ", ".join("-" if shape is None else "..." for shape in call.shapes) + " -> ..."


def add(call: OperatorCall) -> str:
    """Rule of a sum, which passes partial values in both operands together; `x + 1` is affine, and does not."""
    return elementwise(call) + (" | linear: 0+1" if len(call.shapes) == 2 else "")


def mul(call: OperatorCall) -> str:
    return elementwise(call) + linear_factors(call)


def div(call: OperatorCall) -> str:
    """Rule linear in the dividend, if the divisor is above 0 or a number: a part that is 0 by 0 is NaN."""
    affine = call.get("rounding_mode") is not None or call.get("self") is not None
    divides = 1 in call.positive if len(call.shapes) == 2 else call.number("other") != 0
    return elementwise(call) + (" | linear: 0" if divides and not affine else "")


def where(call: OperatorCall) -> str:
    return elementwise(call) + (" | linear: 1+2" if len(call.shapes) == 3 else "")


def masked_fill(call: OperatorCall) -> str:
    return elementwise(call) + (" | linear: 0" if call.get("value") == 0 else "")


def fill(call: OperatorCall) -> str:
    """Rule of a fill: the result has the shape of operand 0 and the value of operand 1 or of an argument."""
    return elementwise(call)


def lerp(call: OperatorCall) -> str:
    return elementwise(call) + (" | linear: 0+1" if 2 not in call.infinite else "")


def quotient_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    return ((0, 1) if needs_grad(operands, 1) else (1,)), (), 0


def power_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    return ((0,), (), 0) if len(operands) == 1 else ((0, 1), (0,), 0)


def power_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Temporary bytes in backward: grad * (n * x ** (n - 1)); of a tensor n, with the cases where n or x is 0."""
    formulas = {0: 2.0} if len(operands) == 1 else {1: 3.25, 0: 4.25}
    return temporaries(formulas)(mesh, op, operands, layouts, results)


# The gradient of each operand by derivatives.yaml (g: the result's, y: the result), in the order in which torch makes
# them, and how many tensors the formula makes before its result; one of booleans takes a quarter.
FORMULAS: list[tuple[str, Formulas]] = [
    ("clamp_max clamp_min", {0: 0.25}),  # where(x >= min, g, 0)
    ("clamp", {0: 0.5}),  # where((x >= min).logical_and_(x <= max), g, 0)
    ("abs cosh sin sinh lgamma", {0: 1}),  # g * cos(x)
    ("exp2 expm1", {0: 1}),  # g * (y + 1)
    ("log10 log1p log2 sqrt", {0: 1}),  # g / (2 * y)
    ("copysign", {1: 0, 0: 1}),  # 0, g * (y / x)
    ("nan_to_num", {0: 1.25}),  # g * (x.isinf() | x.isnan()).logical_not()
    ("atan cos square tan", {0: 2}),  # g / (x * x + 1), g * -x.sin(), g * (2 * x ** 1), g * (1 + y ** 2)
    ("reciprocal rsqrt", {0: 2}),  # -g * (y * y), -0.5 * g * y ** 3
    ("asin", {0: 4}),  # g * (-x * x + 1).rsqrt()
    ("erf erfc erfinv", {0: 4}),  # 2 / sqrt(pi) * exp(-(x ** 2)) * g
    ("acos", {0: 5}),  # g * -(-x * x + 1).rsqrt()
    ("mul", {1: 0, 0: 0}),  # g * x
    ("where", {1: 0, 2: 0}),  # where(condition, g, 0)
    ("div", {1: 3, 0: 0}),  # -g * ((x / y) / y), g / y
    ("fmod remainder", {1: 2}),  # -g * x.div(y, rounding_mode=...)
    ("maximum minimum", {1: 1.5, 0: 1.5}),  # where(x == y, g / 2, g).masked_fill_(x > y, 0)
    ("xlogy", {1: 1, 0: 1.75}),  # g * x / y, xlogy(g, y).masked_fill((x == 0) & (y <= 0), 0)
    ("logaddexp", {1: 3, 0: 3}),  # g / (1 + exp(y - x))
    ("atan2", {0: 3, 1: 5}),  # g * (x / (x * x + y * y)), of both together
    ("addcmul", {1: 1, 2: 1}),  # g * (y * value)
    ("addcdiv", {1: 1, 2: 4}),  # g * (value / z), -g * (value * y / (z * z))
    ("lerp", {1: 0, 0: 1, 2: 1}),  # g * weight, g * (1 - weight), g * (end - x)
]


def sum_traffic(op: LocalOp) -> tuple[float, float]:
    """Backward hands the gradient on, and sums it for an operand that was broadcast. Where two whole branches join,
    their gradients are added once more where they parted (a residual): that addition is charged here."""
    result = op.results[0]
    operands = [tensor for tensor in op.operands if tensor is not None]
    differentiable = [tensor for tensor in operands if tensor.requires_grad]
    sums = sum(result.bytes + tensor.bytes for tensor in differentiable if tensor.numel < result.numel)
    branches = sum(tensor.numel == result.numel for tensor in differentiable)
    return sum(tensor.bytes for tensor in (*operands, result)), sums + (3 * result.bytes if branches > 1 else 0)


def spell_rsub(writer: CodeWriter, operands: Names, arguments: Given) -> str | None:
    other = operands[1] if len(operands) > 1 else writer.literal(arguments.get("other"))
    return f"{other} - {operands[0]}" if arguments.get("alpha", 1) == 1 else None


def spell_where(writer: CodeWriter, operands: Names, arguments: Given) -> str:
    sides = [*([writer.literal(arguments["self"])] if "self" in arguments else []), *map(str, operands[1:])]
    sides += [writer.literal(arguments["other"])] if "other" in arguments else []
    return f"torch.where({', '.join([str(operands[0]), *sides])})"


OPERATORS: dict[str, Operator] = {
    "aten.abs": Operator(rule=elementwise, saves=FIRST, order="operand", spelling="{0}.abs()"),
    "aten.acos": Operator(autocast="high", spelling="{0}.acos()"),
    "aten.add": Operator(
        rule=add, saves=NOTHING, order="operand", bandwidth="elementwise", traffic=sum_traffic, infix="+", in_torch=True
    ),
    "aten.addcdiv": Operator(rule=elementwise, autocast="widest", in_torch=True),
    "aten.addcmul": Operator(rule=elementwise, autocast="widest", in_torch=True),
    "aten.alias": Operator(
        rule="... -> ... | linear: 0",
        saves=NOTHING,
        view=same,
        work=Work.VIEW,
        spelling="{0}",
        keeps_name=True,
        moves=True,
    ),
    "aten.asin": Operator(autocast="high", spelling="{0}.asin()"),
    "aten.atan": Operator(spelling="{0}.atan()"),
    "aten.atan2": Operator(rule=elementwise, autocast="widest", spelling="{0}.atan2({1})"),
    "aten.bitwise_and": Operator(rule=elementwise, infix="&"),
    "aten.bitwise_not": Operator(rule=elementwise, spelling="~{0}"),
    "aten.bitwise_or": Operator(rule=elementwise, infix="|"),
    "aten.bitwise_xor": Operator(rule=elementwise, infix="^"),
    "aten.ceil": Operator(rule=elementwise, spelling="{0}.ceil()"),
    **each("celu erfc fmod logit maximum minimum nan_to_num signbit xlogy", Operator(rule=elementwise, in_torch=True)),
    "aten.clamp": Operator(
        rule=elementwise, saves=FIRST, order="operand", spelling="{0}.clamp(<min><max><min:1><max:2>)"
    ),
    "aten.clamp_max": Operator(rule=elementwise),
    "aten.clamp_min": Operator(rule=elementwise, spelling="{0}.clamp(min={min})"),
    "aten.clone": Operator(rule="... -> ... | linear: 0", spelling="{0}.clone()", keeps_name=True, moves=True),
    "aten.copysign": Operator(saves=keeps(0, results=(0,)), in_torch=True),
    **each("hardshrink isclose isin lgamma logaddexp", Operator(in_torch=True)),
    "aten.cos": Operator(rule=elementwise, saves=FIRST, order="operand", spelling="{0}.cos()"),
    "aten.cosh": Operator(autocast="high", spelling="{0}.cosh()"),
    "aten.detach": Operator(
        rule="... -> ...",
        saves=NOTHING,
        no_gradient=True,
        view=same,
        work=Work.VIEW,
        spelling="{0}.detach()",
        moves=True,
    ),
    "aten.div": Operator(rule=div, saves=quotient_saves, order="operand", infix="/"),
    "aten.elu": Operator(rule=elementwise, spelling="F.elu({0}<alpha=1>)"),
    "aten.eq": Operator(rule=elementwise, infix="=="),
    "aten.erf": Operator(rule=elementwise, saves=FIRST, order="operand", spelling="{0}.erf()"),
    "aten.erfinv": Operator(autocast="high", in_torch=True),
    "aten.exp": Operator(rule=elementwise, saves=RESULT, autocast="high", order="operand", spelling="{0}.exp()"),
    "aten.exp2": Operator(saves=RESULT, spelling="{0}.exp2()"),
    "aten.expm1": Operator(rule=elementwise, saves=RESULT, autocast="high", spelling="{0}.expm1()"),
    "aten.fill": Operator(rule=fill, in_torch=True),
    "aten.floor": Operator(rule=elementwise, spelling="{0}.floor()"),
    "aten.floor_divide": Operator(rule=elementwise, infix="//"),
    "aten.frac": Operator(rule=elementwise, spelling="{0}.frac()"),
    "aten.ge": Operator(rule=elementwise, infix=">="),
    "aten.gelu": Operator(
        rule=elementwise,
        saves=FIRST,
        order="operand",
        bandwidth="activation",
        spelling="F.gelu({0}<approximate='none'>)",
    ),
    "aten.gt": Operator(rule=elementwise, infix=">"),
    "aten.hardsigmoid": Operator(rule=elementwise, spelling="F.hardsigmoid({0})"),
    "aten.hardswish": Operator(rule=elementwise, spelling="F.hardswish({0})"),
    "aten.hardtanh": Operator(rule=elementwise, saves=FIRST, spelling="F.hardtanh({0}, {min_val}, {max_val})"),
    "aten.isfinite": Operator(rule=elementwise, spelling="{0}.isfinite()"),
    "aten.isinf": Operator(rule=elementwise, spelling="{0}.isinf()"),
    "aten.isnan": Operator(rule=elementwise, spelling="{0}.isnan()"),
    "aten.le": Operator(rule=elementwise, infix="<="),
    "aten.leaky_relu": Operator(rule=elementwise, saves=FIRST, spelling="F.leaky_relu({0}<@negative_slope=0.01>)"),
    "aten.lerp": Operator(rule=lerp, in_torch=True),
    "aten.log": Operator(rule=elementwise, saves=FIRST, autocast="high", order="operand", spelling="{0}.log()"),
    "aten.log10": Operator(rule=elementwise, autocast="high", spelling="{0}.log10()"),
    "aten.log1p": Operator(rule=elementwise, autocast="high", spelling="{0}.log1p()"),
    "aten.log2": Operator(rule=elementwise, autocast="high", spelling="{0}.log2()"),
    "aten.log_sigmoid": Operator(rule=elementwise),
    "aten.logical_and": Operator(rule=elementwise, spelling="{0}.logical_and({1})"),
    "aten.logical_not": Operator(rule=elementwise, spelling="{0}.logical_not()"),
    "aten.logical_or": Operator(rule=elementwise, spelling="{0}.logical_or({1})"),
    "aten.logical_xor": Operator(rule=elementwise, spelling="{0}.logical_xor({1})"),
    "aten.logsigmoid": Operator(spelling="F.logsigmoid({0})"),
    "aten.lt": Operator(rule=elementwise, infix="<"),
    "aten.masked_fill": Operator(
        rule=masked_fill, saves=keeps(1), order="operand", spelling="{0}.masked_fill({1}, {value|2})"
    ),
    "aten.mish": Operator(rule=elementwise, spelling="F.mish({0})"),
    "aten.mul": Operator(rule=mul, saves=FACTORS, order="operand", bandwidth="elementwise", infix="*"),
    "aten.ne": Operator(rule=elementwise, infix="!="),
    "aten.neg": Operator(rule="... -> ... | linear: 0", saves=NOTHING, order="operand", spelling="-{0}"),
    "aten.positive": Operator(rule="... -> ... | linear: 0", in_torch=True),
    "aten.pow": Operator(
        rule=elementwise, saves=power_saves, holds=power_holds, autocast="high", order="operand", infix="**"
    ),
    "aten.reciprocal": Operator(rule=elementwise, saves=RESULT, autocast="high", spelling="{0}.reciprocal()"),
    "aten.relu": Operator(
        rule=elementwise, saves=RESULT, order="operand", bandwidth="elementwise", spelling="F.relu({0})"
    ),
    "aten.relu6": Operator(rule=elementwise, spelling="F.relu6({0})"),
    "aten.remainder": Operator(rule=elementwise, infix="%"),
    "aten.round": Operator(rule=elementwise, spelling="{0}.round()"),
    "aten.rsqrt": Operator(rule=elementwise, saves=RESULT, autocast="high", order="operand", spelling="{0}.rsqrt()"),
    "aten.rsub": Operator(rule=elementwise, spelling=spell_rsub),
    "aten.selu": Operator(rule=elementwise, spelling="F.selu({0})"),
    "aten.sigmoid": Operator(
        rule=elementwise, saves=RESULT, order="operand", bandwidth="activation", spelling="{0}.sigmoid()"
    ),
    "aten.sign": Operator(rule=elementwise, spelling="{0}.sign()"),
    "aten.silu": Operator(
        rule=elementwise, saves=FIRST, order="operand", bandwidth="activation", spelling="F.silu({0})"
    ),
    "aten.sin": Operator(rule=elementwise, saves=FIRST, order="operand", spelling="{0}.sin()"),
    "aten.sinh": Operator(autocast="high", spelling="{0}.sinh()"),
    "aten.softplus": Operator(
        rule=elementwise, saves=FIRST, autocast="high", spelling="F.softplus({0}<beta=1><threshold=20>)"
    ),
    "aten.softsign": Operator(spelling="F.softsign({0})"),
    "aten.sqrt": Operator(rule=elementwise, saves=RESULT, order="operand", spelling="{0}.sqrt()"),
    "aten.square": Operator(rule=elementwise, autocast="high", spelling="{0}.square()"),
    "aten.sub": Operator(
        rule=add, saves=NOTHING, order="operand", bandwidth="elementwise", traffic=sum_traffic, infix="-"
    ),
    "aten.tan": Operator(rule=elementwise, saves=RESULT, autocast="high", spelling="{0}.tan()"),
    "aten.tanh": Operator(
        rule=elementwise, saves=RESULT, order="operand", bandwidth="activation", spelling="{0}.tanh()"
    ),
    "aten.tanhshrink": Operator(spelling="F.tanhshrink({0})"),
    "aten.to": Operator(
        rule="... -> ... | linear: 0",
        saves=NOTHING,
        explicit_dtype=True,
        order="operand",
        bandwidth="elementwise",
        spelling="{0}.to({dtype})",
        keeps_name=True,
        moves=True,
    ),
    "aten.trunc": Operator(rule=elementwise, spelling="{0}.trunc()"),
    "aten.where": Operator(rule=where, saves=FIRST, order="operand", spelling=spell_where),
}
OPERATORS = with_formulas(OPERATORS, FORMULAS)
