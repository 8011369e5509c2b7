"""Which tensor's rank a dim argument counts from: a fact of the operator. Dims of operators that are not here stay."""

from __future__ import annotations

_DIM = (
    "all amax amin any argmax argmin argsort cummax cummin cumprod cumsum diff gather glu index_add index_copy",
    "index_fill index_reduce index_select kthvalue linalg_vector_norm log_softmax logcumsumexp logsumexp max",
    "mean median min mode nanmean nanmedian nansum narrow norm prod repeat_interleave scatter scatter_add",
    "scatter_reduce select select_scatter slice slice_scatter softmax sort split split_with_sizes squeeze std",
    "std_mean sum topk unbind unflatten var var_mean _log_softmax _softmax",
)
# Operator -> arguments that are dims, counted in operand 0.
OF_OPERAND: dict[str, tuple[str, ...]] = {
    **{f"aten.{name}": ("dim",) for name in " ".join(_DIM).split()},
    **{f"aten.{name}": ("dims",) for name in ("flip", "permute", "roll", "rot90")},
    "aten.transpose": ("dim0", "dim1"),
    "aten.unfold": ("dimension",),
}
# The same, counted in the result: it has a dim more, or an operand of one dim and no element counts for nothing.
OF_RESULT: dict[str, tuple[str, ...]] = {f"aten.{name}": ("dim",) for name in ("cat", "stack", "unsqueeze")}
