"""A constant that one operator reads twice is made twice, so that each reading may have its own layout.

A cell without a first state is given one tensor of zeros as hidden state, which all units read, and as cell state,
which has the layout of the units.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Graph, Op, Tensor
from autoshard.rules.operators import record


def duplicated_constants(graph: Graph) -> Graph:
    """Make floating constants without operands once for each reading of an operator."""
    ops: list[Op] = []
    tensors: list[Tensor] = []
    for op in graph.ops:
        operands: list[str | None] = []
        for name in op.operands:
            maker = graph.producers.get(name or "")
            if name in operands and maker is not None and _is_constant(graph, maker):
                tensor = replace(graph.tensor(maker.results[0]), name=f"{maker.name}_{op.name}_{len(operands)}")
                tensors.append(tensor)
                ops.append(replace(maker, name=tensor.name, results=(tensor.name,)))
                name = tensor.name
            operands.append(name)
        ops.append(replace(op, operands=tuple(operands)))
    return rewrite(graph, ops, tensors=tensors) if tensors else graph


def _is_constant(graph: Graph, maker: Op) -> bool:
    """True for a constant; random numbers are none: made twice, they would differ."""
    plain = not maker.operands and record(maker.target).draws is None
    return plain and len(maker.results) == 1 and "float" in graph.tensor(maker.results[0]).dtype
