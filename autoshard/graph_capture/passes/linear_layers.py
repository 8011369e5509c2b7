"""Folds the ways to write a linear layer into one N-dimensional op: `aten.linear`, or `autoshard.linear_in_out` for a
weight stored (in, out): input @ weight + bias."""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Graph, Op, Tensor

LINEAR, LINEAR_IN_OUT = "aten.linear", "autoshard.linear_in_out"


def fold_linears(graph: Graph) -> Graph:
    """`addmm` with a vector bias and `mm` of a parameter become linear; between reshapes it takes the outer shape."""
    graph = rewrite(graph, (_as_linear(op, graph) for op in graph.ops))
    ops: list[Op] = []
    tensors: dict[str, Tensor] = {}
    for op in graph.ops:
        outer = _outer_input(op, graph)
        if outer is not None:
            result = graph.tensor(op.results[0])
            tensors[result.name] = replace(result, shape=(*outer.shape[:-1], result.shape[-1]))
            op = replace(op, operands=(outer.name, *op.operands[1:]))
        ops.append(op)
    return rewrite(graph, ops, tensors=tensors.values())


def _as_linear(op: Op, graph: Graph) -> Op:
    if op.target == "aten.addmm" and op.attribute("beta") == 1 and op.attribute("alpha") == 1:
        bias, left, right = op.operands
        if bias is not None and graph.tensor(bias).shape == graph.tensor(op.results[0]).shape[-1:]:
            return _linear(op, left, right, bias, graph)
    if op.target in ("aten.mm", "aten.matmul") and _is_matrix_parameter(op.operands[1], graph):
        return _linear(op, op.operands[0], op.operands[1], None, graph)
    return op


def _linear(op: Op, left: str | None, right: str | None, bias: str | None, graph: Graph) -> Op:
    transposed = _transposed(right, graph)
    target = LINEAR if transposed else LINEAR_IN_OUT
    return replace(op, target=target, operands=(left, transposed or right, bias), attributes=())


def _is_matrix_parameter(name: str | None, graph: Graph) -> bool:
    name = _transposed(name, graph) or name
    stored = name is not None and name not in graph.producers and name not in graph.inputs
    return stored and name is not None and len(graph.tensor(name).shape) == 2


def _transposed(name: str | None, graph: Graph) -> str | None:
    """The matrix that `name` is the transpose of."""
    op = graph.producers.get(name or "")
    if op is not None and op.target == "aten.transpose" and len(graph.tensor(op.results[0]).shape) == 2:
        return op.operands[0]
    return None


def _outer_input(op: Op, graph: Graph) -> Tensor | None:
    """Input of a linear before it was flattened to rows, if only reshapes read the linear's result; else None."""
    if op.target not in (LINEAR, LINEAR_IN_OUT):
        return None
    producer = graph.producers.get(op.operands[0] or "")
    if producer is None or producer.target != "aten.reshape" or producer.operands[0] is None:
        return None
    outer, rows, result = graph.tensor(producer.operands[0]), graph.tensor(producer.results[0]), op.results[0]
    if len(rows.shape) != 2 or len(outer.shape) < 3 or outer.shape[-1] != rows.shape[-1]:
        return None
    readers = graph.consumers[result]
    ends = (*graph.outputs, *(value for _, value in graph.buffer_updates))
    plain = readers and all(reader.target == "aten.reshape" for reader, _ in readers) and result not in ends
    return outer if plain else None
