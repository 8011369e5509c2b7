"""Makes `as_strided`, which reads memory as it lies, read a tensor whose dims are in the order of its memory."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.fills import op_name
from autoshard.graph_capture.tracing.source_lines import node_quote

_HINT = "x.contiguous() before it, or x.unfold(...): how a tensor lies in memory is the plan's to choose"


def in_memory_order(graph: fx.Graph) -> None:
    """Permute, in place, the operand of each `as_strided` until it is contiguous. CaptureError where none is."""
    for node in list(graph.nodes):
        if op_name(node) == "as_strided":
            value = node.args[0].meta["val"]
            order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), -value.shape[d]))
            if not value.permute(order).is_contiguous() or value.storage_offset():
                raise CaptureError(f"as_strided of a part of a tensor, at {node_quote(node)}", _HINT)
            if order != sorted(order):
                with graph.inserting_before(node):
                    turned = graph.call_function(torch.ops.aten.permute.default, (node.args[0], order))
                turned.meta = dict(node.meta) | {"val": value.permute(order)}
                node.replace_input_with(node.args[0], turned)


def refuse_sparse(value: torch.Tensor, place: str) -> None:
    """CaptureError for a tensor that holds only some of its numbers (COO, CSR, ...)."""
    if value.layout is not torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        raise CaptureError(f"tensors of layout {kind} are not supported, at {place}", _SPARSE)


_SPARSE = (
    "rows, columns and values as tensors: torch.zeros(n, d).index_add(0, rows, values[:, None] * x[columns]); "
    "or the matrix dense"
)
