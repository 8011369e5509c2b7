"""Tensors that autograd keeps of an operator until its backward: the answers that several operators share."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.ir.graph import Op, Tensor

Operands = list[Tensor | None]
Kept = tuple[tuple[int, ...], tuple[int, ...], int]  # operand positions, result positions, extra bytes
Saves = Callable[[Op, Operands, list[Tensor]], Kept]


def floating(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Floating operands: assumed for an operator that states nothing."""
    return tuple(i for i, operand in enumerate(operands) if operand is not None and "float" in operand.dtype), (), 0


def keeps(*operands: int, results: tuple[int, ...] = ()) -> Saves:
    """Answer that always keeps these operands and results."""
    return lambda op, inputs, outputs: (operands, results, 0)


def product(left: int = 0, right: int = 1) -> Saves:
    """Answer that keeps each factor for the other's gradient."""

    def saves(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
        return tuple(i for i, j in ((left, right), (right, left)) if needs_grad(operands, j)), (), 0

    return saves


def needs_grad(operands: Operands, position: int) -> bool:
    operand = operands[position] if position < len(operands) else None
    return operand is not None and operand.requires_grad


def accumulator_bytes(operand: Tensor | None) -> int:
    """Bytes per element of a statistic: kernels compute it in float32 at least."""
    return 8 if operand is not None and operand.dtype == "float64" else 4


NOTHING = keeps()
FIRST = keeps(0)
RESULT = keeps(results=(0,))
FACTORS = product()


def _at_dim(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Indices of the extremes along a dim; of an extreme of all elements, itself and the operand."""
    return ((), (1,), 0) if "dim" in dict(op.attributes) else ((0,), (0,), 0)


def _between(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    """Indices, which stand between the tensor that is written to and the values."""
    return tuple(range(1, len(operands) - 1)), (), 0


def _mixed(op: Op, operands: Operands, results: list[Tensor]) -> Kept:
    return ((0, 1, 2) if len(operands) > 2 else ()), (), 0


# What autograd keeps of the operators of ATen that say nothing in their record
SAVED: tuple[tuple[str, Saves], ...] = (
    (
        "ceil clone fill floor frac mT positive round rsub sign t tril triu trunc view "
        "feature_dropout im2col pixel_shuffle pixel_unshuffle _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_trilinear3d",
        NOTHING,
    ),
    ("index_fill scatter scatter_add", keeps(1)),
    ("index_add index_copy", keeps(1, 2)),
    ("gather", keeps(0, 1)),
    ("scatter_reduce", keeps(0, 1, 2, results=(0,))),
    ("index_put", _between),
    ("conv_transpose1d conv_transpose2d conv_transpose3d", keeps(0, 1)),
    ("addcdiv addcmul", keeps(1, 2)),
    ("sort topk kthvalue mode", keeps(results=(1,))),
    ("max min median", _at_dim),
    ("cummax cummin adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices "
     "max_pool3d_with_indices", keeps(0, results=(1,))),
    ("amax amin linalg_vector_norm logsumexp norm prod std", keeps(0, results=(0,))),
    ("nll_loss nll_loss2d nll_loss_nd", keeps(0, 1, 2)),
    ("lerp", _mixed),
)  # fmt: skip
