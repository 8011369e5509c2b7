"""Which values autograd computes a gradient for."""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph.model import Graph

_CUTS = ("aten.detach",)
_STATISTICS = ("aten.batch_norm",)  # results after the first are new running statistics


def mark_gradients(graph: Graph) -> Graph:
    """`requires_grad` on every tensor: trainable parameters, and what is computed from one, when training."""
    marked = {p.tensor for p in graph.parameters if p.trainable and graph.training}
    for op in graph.ops:
        if op.target not in _CUTS and any(operand in marked for operand in op.operands):
            results = op.results[:1] if op.target in _STATISTICS else op.results
            marked.update(result for result in results if "float" in graph.tensor(result).dtype)
    return replace(graph, tensors=tuple(replace(t, requires_grad=t.name in marked) for t in graph.tensors))
