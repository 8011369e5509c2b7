"""Linear layers in float8: which shapes the kernels take, their passes, and the memory that they need next to the
products (emit/runtime/float8.py)."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import largest_shape
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.operator_record import Product
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.algebra.variant_record import Layouts, LocalTensors, Temporary

FLOAT8 = "float8"  # as profiles have it, whichever of its formats; an element is a byte
UNIT = 16  # bytes that matrix units load at once: the kernels of float8 take matrices whose dims are its multiples
IN_FLOAT8 = {  # of a linear its form in float8; both hold their weights alike
    "aten.linear": "autoshard.float8_linear",
    "autoshard.linear_in_out": "autoshard.float8_linear_in_out",
}
PLAIN = {narrow: plain for plain, narrow in IN_FLOAT8.items()}
IN_OUT = frozenset({"autoshard.linear_in_out", "autoshard.float8_linear_in_out"})  # their weights are (in, out)


def fits(x: LocalTensor, weight: LocalTensor) -> bool:
    """True if the kernels take a product of these shapes, forward and backward; what doesn't fit runs in bfloat16."""
    rows = x.numel // max(1, x.shape[-1])
    return x.dtype == "bfloat16" and all(size and size % UNIT == 0 for size in (rows, *weight.shape))


def runs_in_bfloat16(graph: Graph, op: Op, strategy: Strategy, mesh: Mesh) -> bool:
    """True if `op` is a linear in float8 whose shards under `strategy` the kernels don't take."""
    if op.target not in PLAIN:
        return False

    def local(position: int) -> LocalTensor:
        tensor, layout = graph.tensor(op.operands[position] or ""), strategy.operands[position]
        assert layout is not None
        return LocalTensor(largest_shape(tensor.shape, layout, mesh), tensor.dtype, tensor.requires_grad)

    return not fits(local(0), local(1))


def is_cast(op: LocalOp, product: Product) -> bool:
    """True if this product casts its factors here."""
    return bool(product.cast_to) and fits(*_factors(op, product))


def holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Temporary bytes of a product: its factors in float8, with one in bfloat16 while it is scaled, or the copies that
    turn a factor for the kernel."""
    x, weight, result = operands[0], operands[1], results[0]
    assert x is not None and weight is not None and result is not None
    if not fits(x, weight):
        return Temporary()
    inputs, weights, gradient = (float(tensor.numel) for tensor in (x, weight, result))
    forward = max(3 * inputs, inputs + 3 * weights)
    of_input = (gradient + 3 * weights) * x.requires_grad
    of_weight = max(gradient + 3 * inputs, 2 * (gradient + inputs)) * weight.requires_grad
    return Temporary(forward, max(3 * gradient, of_input, of_weight))


@dataclass(frozen=True)
class Casts:
    """Bytes of each pass: of a forward, of what both gradients read, of the input's gradient and of the weight's."""

    forward: tuple[float, ...] = ()
    gradient: tuple[float, ...] = ()
    of_input: tuple[float, ...] = ()
    of_weight: tuple[float, ...] = ()


def casts(op: LocalOp, product: Product) -> Casts:
    """Passes of a product for which `is_cast` holds, kernel by kernel as eager torch runs them: `scaled` reads a tensor
    for its largest element, writes it divided by the scale, and writes that in float8; two kernels between make the
    scale. `product` turns a factor that lies in the other order."""
    x, weight = _factors(op, product)
    result = op.results[0]
    turned, in_out = _turned(weight), op.target in IN_OUT
    return Casts(
        forward=(*_scaled(x), *_scaled(weight), *(turned if in_out else ())),
        gradient=_scaled(result),
        of_input=(*_scaled(weight), *(() if in_out else turned)),
        of_weight=(*_scaled(x), *_turned(x), *_turned(result)),
    )


def joined_casts(op: LocalOp, product: Product) -> Casts:
    """Passes of the casts as a compiler runs them, by torchao's own roofline (torchao.testing.float8.roofline_utils,
    casts recomputed in backward): a pass for the largest element, a small one, and one that casts, to both orders where
    a gradient is used in both."""
    x, weight = _factors(op, product)
    result = op.results[0]

    def cast(tensor: LocalTensor, orders: int = 1) -> float:
        return float(tensor.bytes + orders * tensor.numel)

    return Casts(
        forward=(float(x.bytes), 0.0, cast(x), float(weight.bytes), 0.0, cast(weight)),
        gradient=(float(result.bytes), 0.0, cast(result, 2)),
        of_input=(cast(weight),),
        of_weight=(cast(x),),
    )


def _factors(op: LocalOp, product: Product) -> tuple[LocalTensor, LocalTensor]:
    x, weight = product.multiplied
    return op.operand(x), op.operand(weight)


def _scaled(x: LocalTensor) -> tuple[float, ...]:
    return float(x.bytes), 0.0, 0.0, 2.0 * x.bytes, float(x.bytes + x.numel)


def _turned(x: LocalTensor) -> tuple[float, ...]:
    return (2.0 * x.numel,)
