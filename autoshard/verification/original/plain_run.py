"""Calls the original model as a user would, to tell its own mistakes from those of verification."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.errors import CaptureError
from autoshard.graph_capture.tracing.flex_attention import dense_flex_attention
from autoshard.graph_capture.tracing.source_lines import blame
from autoshard.ir.graph import Graph
from autoshard.verification.original.reference import as_captured, outputs_of


def fault_of_model(module: torch.nn.Module, examples: Sequence[torch.Tensor], graph: Graph) -> CaptureError | None:
    """Error if a model with values can't be trained with its example inputs, else None. A trace has no values: it
    misses, say, an index beyond a table, or a buffer overwritten before backward reads it."""
    try:
        with torch.random.fork_rng(devices=[]), dense_flex_attention():
            outputs = outputs_of(module(*as_captured(graph, examples)))
            if graph.loss is not None:
                outputs[graph.outputs.index(graph.loss)].backward()
    except Exception as error:
        message = f"the model itself fails with its example inputs, on the CPU: {blame(error)}"
        return CaptureError(message, "call model(*inputs) in Python: it must run")
    return None
