"""A reshape of a reshape is one reshape."""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Graph, Op


def merge_reshapes(graph: Graph) -> Graph:
    """Every `aten.reshape` reads what no reshape made; the ones between may become dead."""
    origin: dict[str, str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if op.target == "aten.reshape" and op.operands[0] is not None:
            source = origin.get(op.operands[0], op.operands[0])
            origin[op.results[0]] = source
            op = replace(op, operands=(source,))
        ops.append(op)
    return rewrite(graph, ops)
