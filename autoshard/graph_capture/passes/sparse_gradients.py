"""Sparse gradients of tables are dense here: the same numbers, which collectives and AdamW take."""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Graph, Op


def dense_gradients(graph: Graph) -> Graph:
    """Every look-up with `sparse=False`; `assumed` says where that was otherwise."""
    sparse = [op for op in graph.ops if dict(op.attributes).get("sparse") is True]
    if not sparse:
        return graph
    changed = rewrite(graph, [_dense(op) if op in sparse else op for op in graph.ops])
    places = dict.fromkeys(f"gradients are dense, sparse=True says nothing{_place(op)}" for op in sparse)
    return replace(changed, assumed=(*graph.assumed, *places))


def _dense(op: Op) -> Op:
    return replace(op, attributes=tuple((n, False if n == "sparse" else value) for n, value in op.attributes))


def _place(op: Op) -> str:
    return f" (in {op.module})" if op.module else f" (at {op.source})" if op.source else ""
