"""Operators to prove: for each a few shapes, with dims that 2 and 3 divide and dims that they don't."""

from __future__ import annotations

from autoshard.graph.model import Attribute
from autoshard.rules.prove import OpCase, Operand

Shape = tuple[int, ...]


def floats(*shapes: Shape | None) -> tuple[Operand | None, ...]:
    return tuple(None if shape is None else Operand(shape) for shape in shapes)


def positive(*shapes: Shape) -> tuple[Operand | None, ...]:
    return tuple(Operand(shape, positive=True) for shape in shapes)


def constants(*shapes: Shape) -> tuple[Operand | None, ...]:
    """Positive, and without a gradient: running statistics."""
    return tuple(Operand(shape, gradient=False, positive=True) for shape in shapes)


def integers(shape: Shape, high: int, low: int = 0) -> Operand:
    return Operand(shape, "int64", low, high)


def booleans(shape: Shape) -> Operand:
    return Operand(shape, "bool")


def case(target: str, operands: tuple[Operand | None, ...], **attributes: Attribute) -> OpCase:
    return OpCase(target, operands, tuple(attributes.items()))


LINEAR_ALGEBRA = [
    case("aten.linear", floats((4, 5, 6), (7, 6), (7,))),
    case("aten.linear", floats((4, 6), (8, 6), None)),
    case("aten.linear", floats((6,), (4, 6), (4,))),
    case("autoshard.linear_in_out", floats((4, 5, 6), (6, 12), (12,))),
    case("aten.matmul", floats((4, 3, 5, 6), (4, 3, 6, 4))),
    case("aten.matmul", floats((4, 1, 5, 6), (3, 6, 4))),
    case("aten.matmul", floats((5, 6), (6,))),
    case("aten.matmul", floats((6,), (4, 6, 5))),
    case("aten.matmul", floats((6,), (6,))),
    case("aten.mm", floats((5, 6), (6, 4))),
    case("aten.mv", floats((5, 6), (6,))),
    case("aten.dot", floats((6,), (6,))),
    case("aten.bmm", floats((4, 5, 6), (4, 6, 3))),
    case("aten.addmm", floats((4,), (5, 6), (6, 4)), beta=1, alpha=1),
    case("aten.addmm", floats((5, 1), (5, 6), (6, 4)), beta=2, alpha=3),
    case("aten.baddbmm", floats((4, 1, 3), (4, 5, 6), (4, 6, 3)), beta=1, alpha=1),
    case("aten.einsum", floats((4, 5, 6), (6, 7)), equation="bsm,mn->bsn"),
]
ATTENTION = [
    case("aten.scaled_dot_product_attention", floats(*[(4, 6, 5, 3)] * 3, None), dropout_p=0.0, is_causal=True),
    case("aten.scaled_dot_product_attention", floats((4, 5, 6, 3), (4, 5, 7, 3), (4, 5, 7, 4), None), is_causal=False),
    case("aten.scaled_dot_product_attention", (*floats(*[(4, 5, 6, 3)] * 3), booleans((4, 1, 6, 6)))),
    case("aten.scaled_dot_product_attention", floats(*[(4, 5, 6, 3)] * 3, (6, 6)), scale=0.3),
    case("aten.scaled_dot_product_attention", floats((4, 6, 5, 3), (4, 2, 5, 3), (4, 2, 5, 3), None), enable_gqa=True),
    case("aten.scaled_dot_product_attention", floats(*[(5, 6, 3)] * 3)),
]
NORMALISATION = [
    case("aten.softmax", floats((4, 5, 6)), dim=-1, dtype=None),
    case("aten.log_softmax", floats((4, 5, 6)), dim=1, dtype=None),
    case("aten._softmax", floats((4, 5)), dim=0, half_to_float=False),
    case("aten.layer_norm", floats((4, 5, 6), (6,), (6,)), normalized_shape=(6,), eps=1e-5, cudnn_enable=False),
    case("aten.layer_norm", floats((4, 5, 6), None, None), normalized_shape=(5, 6), eps=1e-5),
    case("aten.rms_norm", floats((4, 5, 6), (6,)), normalized_shape=(6,), eps=1e-5),
    case(
        "aten.batch_norm",
        (*floats((4, 6, 5, 3), (6,), (6,)), *constants((6,), (6,))),
        training=False, momentum=0.1, eps=1e-5, cudnn_enabled=False,
    ),
    case(
        "aten.batch_norm", floats((4, 6, 5), (6,), None, None, None),
        training=True, momentum=0.1, eps=1e-5, cudnn_enabled=False,
    ),
]  # fmt: skip
ELEMENTWISE = [
    *(
        case(f"aten.{name}", floats((4, 5)))
        for name in ["neg", "exp", "tanh", "sigmoid", "relu", "silu", "sin", "cos", "abs", "erf"]
    ),
    *(case(f"aten.{name}", positive((5, 6))) for name in ["log", "sqrt", "rsqrt", "reciprocal", "log1p"]),
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
    case("aten.maximum", floats((4, 5), (5,))),
    case("aten.where", (booleans((4, 5)), *floats((4, 5), (5,)))),
    case("aten.where", (booleans((5, 1)), *floats((4, 5, 6), (4, 5, 6)))),
    case("aten.masked_fill", (*floats((4, 5, 6)), booleans((5, 6))), value=0),
    case("aten.masked_fill", (*floats((4, 5, 6)), booleans((5, 6))), value=-1.0),
    case("aten.lerp", floats((4, 5), (4, 5)), weight=0.3),
    case("aten.addcmul", floats((4, 5), (4, 5), (5,)), value=2),
    case("aten.clone", floats((4, 5)), memory_format=None),
    case("aten.eq", (integers((4, 5), 3), integers((4, 1), 3))),
    case("aten.gt", floats((4, 5)), other=0.0),
    case("aten.logical_not", (booleans((4, 5)),)),
    case("aten.logical_and", (booleans((4, 5)), booleans((5,)))),
    case("aten.__and__", (booleans((4, 5)), booleans((5,)))),
    case("aten.ones_like", floats((4, 5))),
    case("aten.detach", floats((4, 5))),
]
REDUCTIONS = [
    case("aten.sum", floats((4, 5, 6)), dim=(1,), keepdim=False, dtype=None),
    case("aten.sum", floats((4, 5, 6)), dim=(0, -1), keepdim=True, dtype=None),
    case("aten.sum", floats((4, 5)), dtype=None),
    case("aten.sum", (integers((4, 5), 9),), dim=(1,), keepdim=False, dtype=None),
    case("aten.mean", floats((4, 5, 6)), dim=(1,), keepdim=False, dtype=None),
    case("aten.mean", floats((4, 5, 6)), dim=(-2, 0), keepdim=True, dtype=None),
    case("aten.mean", floats((4, 5)), dtype=None),
    case("aten.amax", floats((4, 5)), dim=(1,), keepdim=False),
    case("aten.max", floats((4, 5)), dim=1, keepdim=False),
    case("aten.argmax", floats((4, 5)), dim=1, keepdim=True),
    case("aten.logsumexp", floats((4, 5)), dim=(1,), keepdim=False),
    case("aten.var", floats((4, 5, 6)), dim=(2,), correction=1, keepdim=True),
    case("aten.cumsum", floats((4, 5)), dim=1, dtype=None),
    case("aten.cumprod", positive((4, 5)), dim=0, dtype=None),
    case("aten.topk", floats((4, 5)), k=2, dim=-1, largest=True, sorted=True),
    case("aten.sort", floats((4, 5)), dim=-1, descending=False),
    case("aten.diff", (integers((4, 5), 9), integers((4, 1), 9), None), n=1, dim=-1),
    case("aten.tril", floats((4, 5, 6)), diagonal=0),
    case("aten.any", (booleans((4, 5)),), dim=1, keepdim=False),
]
VIEWS = [
    case("aten.reshape", floats((4, 5, 6)), shape=(4, 5, 3, 2)),
    case("aten.reshape", floats((4, 5, 6)), shape=(20, 6)),
    case("aten.reshape", floats((4, 6)), shape=(2, 12)),
    case("aten.reshape", floats((6, 4)), shape=(4, 6)),
    case("aten.reshape", floats((4, 1, 6)), shape=(1, 4, 2, 1, 3)),
    case("aten.reshape", floats((4, 10, 6)), shape=(4, 5, 2, 6)),
    case("aten.reshape", floats((2, 6, 6)), shape=(72,)),
    case("aten.view", floats((4, 6)), size=(24,)),
    case("aten.flatten", floats((4, 5, 6)), start_dim=1, end_dim=-1),
    case("aten.unflatten", floats((4, 6)), dim=-1, sizes=(3, 2)),
    case("aten.squeeze", floats((4, 1, 6)), dim=1),
    case("aten.unsqueeze", floats((4, 6)), dim=-1),
    case("aten.expand", floats((4, 1, 6)), size=(4, 5, -1), implicit=False),
    case("aten.expand", floats((1, 6)), size=(3, 4, 6), implicit=False),
    case("aten.permute", floats((4, 5, 6)), dims=(2, 0, 1)),
    case("aten.transpose", floats((4, 5, 6)), dim0=-1, dim1=1),
    case("aten.t", floats((4, 5))),
    case("aten.split", floats((4, 12)), split_size=4, dim=-1),
    case("aten.split", floats((10, 4)), split_size=4, dim=0),
    case("aten.split_with_sizes", floats((4, 16)), split_sizes=(8, 4, 4), dim=1),
    case("aten.split_with_sizes", floats((4, 7)), split_sizes=(4, 3), dim=1),
    case("aten.chunk", floats((4, 12)), chunks=2, dim=1),
    case("aten.cat", floats((4, 6), (4, 6)), dim=1),
    case("aten.cat", floats((6, 4), (3, 4)), dim=0),
    case("aten.stack", floats((4, 5), (4, 5)), dim=1),
    case("aten.unbind", floats((4, 3, 5)), dim=1),
    case("aten.select", floats((4, 5, 6)), dim=1, index=2),
    case("aten.slice", floats((4, 6)), dim=1, start=1, end=5, step=2),
    case("aten.slice", floats((4, 6)), dim=0, start=0, end=2**60, step=1),
    case("aten.pad", floats((4, 6)), pad=(0, 1), mode="constant", value=None),
    case("aten.pad", floats((4, 6)), pad=(1, -1), mode="constant", value=2.0),
    case("aten.flip", floats((4, 5)), dims=(1,)),
    case("aten.roll", floats((4, 6)), shifts=(2,), dims=(0,)),
    case("aten.repeat", floats((4, 5)), repeats=(3, 1, 2)),
    case("aten.repeat_interleave", floats((4, 6)), repeats=2, dim=1, output_size=12),
    case("aten.glu", floats((4, 6)), dim=-1),
]
INDEXING = [
    case(
        "aten.embedding", (Operand((7, 4)), integers((4, 5), 7)), padding_idx=-1, scale_grad_by_freq=False, sparse=False
    ),
    case(
        "aten.embedding", (Operand((7, 4)), integers((4, 5), 7)), padding_idx=3, scale_grad_by_freq=False, sparse=False
    ),
    case(
        "aten.embedding", (Operand((7, 4)), integers((4, 5), 7)), padding_idx=-1, scale_grad_by_freq=True, sparse=False
    ),
    case("aten.gather", (Operand((4, 7)), integers((4, 5), 7)), dim=1, sparse_grad=False),
    case("aten.gather", (Operand((4, 7)), integers((3, 7), 4)), dim=0, sparse_grad=False),
    case("aten.index_select", (Operand((4, 7)), integers((5,), 7)), dim=1),
    case("aten.index", (Operand((7, 6)), integers((4, 5), 7))),
    case("aten.index", (Operand((4, 7, 6)), None, integers((5,), 7))),
    case("aten.index", (integers((4, 6), 9), integers((4, 1, 1, 1), 4), integers((1, 1, 6, 1), 6))),
    case("aten.index", (Operand((4, 7, 6)), integers((5,), 4), None, integers((5,), 6))),
]
CONVOLUTION = [
    case("aten.conv2d", floats((4, 6, 5, 5), (8, 6, 3, 3), (8,)), stride=(1, 1), padding=(1, 1), groups=1),
    case("aten.conv2d", floats((4, 6, 5, 5), (9, 2, 3, 3), (9,)), stride=(2, 2), padding=(0, 0), groups=3),
    case("aten.conv2d", floats((4, 6, 5, 5), (6, 1, 3, 3), None), stride=(1, 1), padding=(1, 1), groups=6),
    case("aten.conv1d", floats((4, 6, 5), (4, 6, 2), None), stride=(1,), padding=(0,), groups=1),
    case("aten.max_pool2d", floats((4, 5, 6, 6)), kernel_size=(2, 2), stride=(2, 2)),
    case("aten.avg_pool2d", floats((4, 5, 6, 6)), kernel_size=(2, 2), stride=(2, 2)),
    case("aten.adaptive_avg_pool2d", floats((4, 5, 6, 6)), output_size=(1, 1)),
]
LABELS = integers((6,), 7)
LOSSES = [
    case("aten.cross_entropy_loss", (Operand((6, 7)), LABELS, None), reduction=1, ignore_index=2, label_smoothing=0.1),
    case("aten.cross_entropy_loss", (Operand((4, 7, 5)), integers((4, 5), 7), None), reduction=1, ignore_index=2),
    case("aten.cross_entropy_loss", (Operand((7,)), integers((), 7), None), reduction=1, ignore_index=-100),
    case("aten.cross_entropy_loss", (Operand((6, 7)), LABELS, None), reduction=2, ignore_index=2),
    case("aten.cross_entropy_loss", (Operand((6, 7)), LABELS, Operand((7,), gradient=False)), reduction=0),
    case("aten.cross_entropy_loss", (Operand((6, 7)), Operand((6, 7), gradient=False), None), reduction=1),
    case("aten.nll_loss_nd", (Operand((6, 7)), LABELS, None), reduction=1, ignore_index=-100),
    case("aten.nll_loss_nd", (Operand((4, 7, 5)), integers((4, 5), 7), None), reduction=2, ignore_index=-100),
    case("aten.mse_loss", floats((4, 5), (4, 5)), reduction=1),
    case("aten.mse_loss", floats((4, 5), (4, 5)), reduction=2),
    case("aten.mse_loss", floats((4, 5), (4, 5)), reduction=0),
]
RANDOM = [
    case("aten.dropout", floats((4, 5, 6)), p=0.3, train=True),
    case("aten.dropout", floats((4, 5, 6)), p=0.3, train=False),
    case("aten.scaled_dot_product_attention", floats(*[(4, 6, 5, 3)] * 3, None), dropout_p=0.2, is_causal=True),
]
ALL = [
    *LINEAR_ALGEBRA, *ATTENTION, *NORMALISATION, *ELEMENTWISE, *REDUCTIONS,
    *VIEWS, *INDEXING, *CONVOLUTION, *LOSSES, *RANDOM,
]  # fmt: skip


def case_id(one: OpCase) -> str:
    shapes = ",".join("-" if o is None else "x".join(map(str, o.shape)) or "()" for o in one.operands)
    return f"{one.target}[{shapes}]"
