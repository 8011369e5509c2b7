"""Products of matrices. Weights: `aten.linear` holds (out, in), `autoshard.linear_in_out` (in, out)."""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.graph import DTYPE_BYTES, Op, Tensor
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import NoRule, OperatorCall, linear_factors
from autoshard.rules.algebra.float8_products import FLOAT8, holds
from autoshard.rules.algebra.operator_record import Operator, Product, TensorParallel, each
from autoshard.rules.algebra.saved_for_backward import FACTORS, RESULT, Kept, Operands, product
from autoshard.rules.algebra.variant_record import Layouts, LocalTensors, Temporary, temporaries


def matmul(call: OperatorCall) -> str:
    left, right = (len(shape) for shape in call.shapes[:2] if shape is not None)
    first = "k" if left == 1 else "m k" if left == 2 else "... m k"
    second = "k" if right == 1 else "k n" if right == 2 else "... k n"
    batch = "... " if max(left, right) > 2 else ""
    result = f"{batch}{'m ' * (left > 1)}{'n' * (right > 1)}".strip() or "()"
    return f"{first}, {second} -> {result} | sum: k"


def addmm(call: OperatorCall) -> str:
    return f"{_added(call, 'm', 'n')}, m k, k n -> m n | sum: k"


def baddbmm(call: OperatorCall) -> str:
    return f"{_added(call, 'b', 'm', 'n')}, b m k, b k n -> b m n | sum: k"


def _added(call: OperatorCall, *names: str) -> str:
    """Term of the added operand, which broadcasts to the result: its dims of size 1 are literal."""
    aligned = names[len(names) - call.rank :]
    return "+" + (" ".join("1" if size == 1 else name for size, name in zip(call.shape, aligned, strict=True)) or "()")


def einsum(call: OperatorCall) -> str:
    """Rule of an einsum: `bij,bjk->bik` is one already; diagonals and `...` are not offered."""
    equation = str(call.get("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        raise NoRule
    summed = sorted(set(left) - set(right) - {","})
    operands = ", ".join(" ".join(part) or "()" for part in left.split(","))
    return f"{operands} -> {' '.join(right) or '()'}" + (f" | sum: {' '.join(summed)}" if summed else "")


LINEAR = Product((0, 1), 2, (0, -1))
FLOAT8_LINEAR = replace(LINEAR, cast_to=FLOAT8)
MATMUL = Product((0, 1), None, (0, -1))
ADDMM = Product((1, 2), 0, (1, -1))


def determinant_saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Also the LU factors, of the size of the matrix."""
    matrix = operands[0]
    assert matrix is not None
    return (0,), (0,), matrix.numel * DTYPE_BYTES[matrix.dtype]


def outer(call: OperatorCall) -> str:
    return "a, b -> a b" + linear_factors(call)


def bilinear_holds(mesh: Mesh, op: Op, operands: LocalTensors, layouts: Layouts, results: LocalTensors) -> Temporary:
    """Temporary bytes of the products of all pairs of inputs in a row, for one result."""
    x, y = operands[:2]
    assert x is not None and y is not None
    size = float(x.bytes * y.shape[-1])
    return Temporary(size, size)


OPERATORS: dict[str, Operator] = {
    **each("addbmm chain_matmul linalg_multi_dot linalg_vecdot", Operator(autocast="low")),
    "aten.addmm": Operator(
        rule=addmm,
        saves=product(1, 2),
        autocast="low",
        work=ADDMM,
        spelling="torch.addmm({0}, {1}, {2}<beta=1><alpha=1>)",
    ),
    "aten.addmv": Operator(autocast="low", in_torch=True),
    "aten.addr": Operator(autocast="low", in_torch=True),
    "aten.baddbmm": Operator(rule=baddbmm, saves=product(1, 2), autocast="low", work=ADDMM, in_torch=True),
    "aten.bilinear": Operator(autocast="widest", in_torch=True, holds=bilinear_holds),
    "aten.bmm": Operator(
        rule="b m k, b k n -> b m n | sum: k",
        saves=FACTORS,
        autocast="low",
        work=MATMUL,
        infix="@",
    ),
    "aten.cross": Operator(autocast="widest", in_torch=True),
    "aten.dot": Operator(rule="k, k -> () | sum: k", autocast="widest", in_torch=True),
    "aten.einsum": Operator(rule=einsum, autocast="low", spelling="torch.einsum({equation}, {*})"),
    **each("inner trace", Operator(in_torch=True)),
    "aten.kron": Operator(in_torch=True, spelling="torch.kron({0}.contiguous(), {1}.contiguous())"),  # it views them
    "aten.linear": Operator(
        rule="... m, n m, +n? -> ... n | sum: m",
        saves=FACTORS,
        autocast="low",
        traced_as=("addmm",),
        work=LINEAR,
        spelling="F.linear({0}, {1}<2>)",
        tensor_parallel=TensorParallel(("n", "m"), (), False),
        split_words={(1, 0): "column-parallel", (1, 1): "row-parallel"},
    ),
    "autoshard.linear_in_out": Operator(
        rule="... m, m n, +n? -> ... n | sum: m",
        saves=FACTORS,
        autocast="low",
        work=LINEAR,
        spelling="F.linear({0}, {1}.t()<2>)",
        tensor_parallel=TensorParallel(("n", "m"), (), False),
        split_words={(1, 1): "column-parallel", (1, 0): "row-parallel"},
    ),
    "autoshard.float8_linear": Operator(
        rule="... m, n m, +n? -> ... n | sum: m",
        saves=FACTORS,
        traced_as=("scaled_mm",),
        work=FLOAT8_LINEAR,
        holds=holds,
        spelling="float8_linear({0}, {1}<2>)",
        tensor_parallel=TensorParallel(("n", "m"), (), False),
        split_words={(1, 0): "column-parallel", (1, 1): "row-parallel"},
    ),
    "autoshard.float8_linear_in_out": Operator(
        rule="... m, m n, +n? -> ... n | sum: m",
        saves=FACTORS,
        work=FLOAT8_LINEAR,
        holds=holds,
        spelling="float8_linear({0}, {1}.t()<2>)",
        tensor_parallel=TensorParallel(("n", "m"), (), False),
        split_words={(1, 1): "column-parallel", (1, 0): "row-parallel"},
    ),
    "aten.matmul": Operator(
        rule=matmul, saves=FACTORS, autocast="low", traced_as=("mm", "bmm"), work=MATMUL, infix="@"
    ),
    "aten.outer": Operator(holds=temporaries({1: 0, 0: 0}), rule=outer, saves=FACTORS, in_torch=True),
    "aten.linalg_cholesky": Operator(saves=RESULT, holds=temporaries({0: 3})),
    "aten.linalg_det": Operator(holds=temporaries({0: 2})),
    "aten.linalg_eigh": Operator(holds=temporaries({0: 3})),
    "aten.linalg_qr": Operator(holds=temporaries({0: 3})),
    "aten.linalg_svd": Operator(holds=temporaries({0: 6})),
    "aten.linalg_inv": Operator(saves=RESULT, holds=temporaries({0: 2}, 1)),
    "aten.linalg_slogdet": Operator(saves=determinant_saves, holds=temporaries({0: 1})),
    "aten.mm": Operator(rule="m k, k n -> m n | sum: k", saves=FACTORS, autocast="low", work=MATMUL, infix="@"),
    "aten.mv": Operator(rule="m k, k -> m | sum: k", autocast="low", infix="@"),
    "aten.tensordot": Operator(autocast="widest"),
    "aten.vdot": Operator(autocast="widest"),
}
