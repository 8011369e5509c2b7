"""Mixed precision as casts in the graph, by the rules of torch.autocast; parameters stay float32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.capture.passes.rewrite import rewrite
from autoshard.capture.training.requires_grad import mark_gradients
from autoshard.capture.training.saved_tensors import note_saved
from autoshard.errors import UsageError
from autoshard.ir.graph import DTYPE_BYTES, Graph, Op, Tensor

PRECISIONS = {"fp32": "", "bf16-mixed": "bfloat16"}
# The lists of CUDA's autocast, which are those of ATen/autocast_mode.h; what torch makes of these operators alone (a
# cross entropy is a log-softmax and an nll_loss) stands with them. What is in no list runs as its operands are.
_LOW_NAMES = """
    conv1d conv2d conv3d convolution _convolution conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu
    linear matmul mm mv bmm addmm addmv addr addbmm baddbmm einsum chain_matmul linalg_multi_dot linalg_vecdot
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell
    _thnn_fused_gru_cell scaled_dot_product_attention _scaled_dot_product_flash_attention
"""
_HIGH_NAMES = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    native_layer_norm rms_norm group_norm norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d nll_loss_nd cross_entropy_loss hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa square
"""
_HIGH_UNLESS_TOLD_NAMES = """
    prod softmax _softmax log_softmax _log_softmax softmin cumprod cumsum linalg_norm linalg_vector_norm
    linalg_matrix_norm sum
"""  # their own dtype argument goes before
_WIDEST_NAMES = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
_REFUSED_NAMES = "binary_cross_entropy"  # on CUDA; autocast on CPUs runs it in float32


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


LOW = _names(_LOW_NAMES) | {"autoshard.linear_in_out"}
HIGH = _names(_HIGH_NAMES) | _names(_REFUSED_NAMES)
HIGH_UNLESS_TOLD = _names(_HIGH_UNLESS_TOLD_NAMES)
WIDEST = _names(_WIDEST_NAMES)
_LOW_OPERANDS = {"autoshard.experts": (0, 1, 2)}  # the weights of the chosen experts stay as they are
_BY_FIRST = {"aten.batch_norm", "aten.instance_norm"}  # wider statistics take no part in the result's dtype
_KEEPS_DTYPE = {"aten.to", "aten.full", "aten.arange", "autoshard.constant"}


def apply_precision(graph: Graph, precision: str) -> Graph:
    """`graph` as it runs under `precision`: "fp32" (as written) or "bf16-mixed". A cast is made once and shared."""
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision {precision!r}", f"one of {', '.join(PRECISIONS)}")
    if not PRECISIONS[precision]:
        return replace(graph, precision=precision)
    ops, tensors = _Caster(graph, PRECISIONS[precision]).run()
    cast = replace(rewrite(graph, ops, tensors=tensors.values()), precision=precision)
    return note_saved(mark_gradients(cast))


class _Caster:
    def __init__(self, graph: Graph, low: str) -> None:
        self.graph, self.low = graph, low
        self.tensors = dict(graph.by_name)
        self.casts: dict[tuple[str, str], str] = {}
        self.ops: list[Op] = []

    def run(self) -> tuple[list[Op], dict[str, Tensor]]:
        for op in self.graph.ops:
            self._add(op)
        for buffer, value in self.graph.buffer_updates:
            assert self.tensors[buffer].dtype == self.tensors[value].dtype, f"the update of {buffer} changed its dtype"
        return self.ops, self.tensors

    def _add(self, op: Op) -> None:
        own = _LOW_OPERANDS.get(op.target, tuple(range(len(op.operands))))
        wanted = self._wanted(op)
        if wanted and self._is_floating(op):
            op = replace(
                op, operands=tuple(self._cast(n, wanted, op) if i in own else n for i, n in enumerate(op.operands))
            )
        dtype = None if op.target in _KEEPS_DTYPE or _told(op) else wanted or self._promoted(op)
        for position, name in enumerate(op.results):
            if dtype and self._changes(name) and not (op.target in _BY_FIRST and position):
                self.tensors[name] = replace(self.tensors[name], dtype=dtype)
        self.ops.append(op)

    def _wanted(self, op: Op) -> str:
        """The dtype that the operator's floating operands are cast to, "" where they stay as they are."""
        if op.target in LOW or op.target in _LOW_OPERANDS:
            return self.low
        if op.target in HIGH or (op.target in HIGH_UNLESS_TOLD and not _told(op)):
            return "float32"
        if op.target in WIDEST:
            kinds = {self.tensors[name].dtype for name in op.operands if name is not None}
            return "float32" if {"float32", self.low} <= kinds else ""
        return ""

    def _changes(self, name: str) -> bool:
        return self.tensors[name].dtype in ("float32", self.low)

    def _is_floating(self, op: Op) -> bool:
        return any(name is not None and "float" in self.tensors[name].dtype for name in op.operands)

    def _promoted(self, op: Op) -> str | None:
        operands = [self.tensors[name] for name in op.operands if name is not None]
        return result_dtype(operands[:1] if op.target in _BY_FIRST else operands)

    def _cast(self, name: str | None, dtype: str, user: Op) -> str | None:
        """The value in `dtype`; the cast stands before its first reader. float64 stays, as under autocast."""
        if name is None or not self._changes(name) or self.tensors[name].dtype == dtype:
            return name
        made = self.casts.get((name, dtype))
        if made is None:
            made = self.casts[name, dtype] = self._fresh(f"{name}_{dtype}")
            self.tensors[made] = replace(self.tensors[name], name=made, dtype=dtype)
            self.ops.append(Op(made, "aten.to", (name,), (("dtype", dtype),), (made,), user.module, user.source))
        return made

    def _fresh(self, name: str) -> str:
        while name in self.tensors:
            name += "_"
        return name


def _told(op: Op) -> bool:
    """Does the operator name the dtype of its result?"""
    return op.target in HIGH_UNLESS_TOLD and any(name == "dtype" and value is not None for name, value in op.attributes)


def result_dtype(operands: Sequence[Tensor]) -> str | None:
    """The floating dtype that torch promotes `operands` to, None without floating ones; 0-d ones only count alone."""
    floating = [tensor for tensor in operands if "float" in tensor.dtype]
    dims = [tensor for tensor in floating if tensor.shape] or floating
    if not dims:
        return None
    kinds = {tensor.dtype for tensor in dims}
    if kinds == {"bfloat16", "float16"}:
        return "float32"
    return max(kinds, key=lambda kind: DTYPE_BYTES[kind])
