"""Repeated key heads (`unsqueeze`, `expand`, `reshape`, as the transformers library writes them) are one operator."""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Graph, Op, Saved


def fold_repeats(graph: Graph) -> Graph:
    """x[:, :, None].expand(..., r, ...).reshape(...) becomes `x.repeat_interleave(r, dim)`; the views may go dead."""
    return rewrite(graph, [_repeat(op, graph) or op for op in graph.ops])


def _repeat(op: Op, graph: Graph) -> Op | None:
    """The reshape as a repetition, if it merges a dim with the one after it, which an expand made of nothing."""
    expand = graph.producers.get(op.operands[0] or "") if op.target == "aten.reshape" else None
    unsqueeze = graph.producers.get(expand.operands[0] or "") if expand and expand.target == "aten.expand" else None
    if expand is None or unsqueeze is None or unsqueeze.target != "aten.unsqueeze":
        return None
    source = unsqueeze.operands[0]
    assert source is not None
    before, after, result = (graph.tensor(x).shape for x in (source, expand.results[0], op.results[0]))
    new = unsqueeze.attribute("dim")
    assert isinstance(new, int)
    dim, times = new % len(after) - 1, after[new % len(after)]
    merged = (*before[:dim], before[dim] * times, *before[dim + 1 :]) if dim >= 0 else ()
    if after != (*before[: dim + 1], times, *before[dim + 1 :]) or result != merged:
        return None
    attributes = (("repeats", times), ("dim", dim), ("output_size", None))
    return replace(op, target="aten.repeat_interleave", operands=(source,), attributes=attributes, saved=Saved())
