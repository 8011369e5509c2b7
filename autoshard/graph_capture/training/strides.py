"""How values lie in memory when each op runs on whole tensors: strides in elements, and who shares storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from autoshard.ir.graph import Graph, Op
from autoshard.rules.algebra.view_strides import Strides, contiguous, dense
from autoshard.rules.operators import record


@dataclass
class StridedMemory:
    """`strides` by value name; `aliases` by op name: (result, operand) pairs that share storage."""

    strides: dict[str, Strides] = field(default_factory=dict)
    aliases: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)


def memory_layout(graph: Graph) -> StridedMemory:
    """Strides of every value and the storage each op shares with its operand."""
    memory = StridedMemory({t.name: contiguous(t.shape) for t in graph.tensors})
    for op in graph.ops:
        view = record(op.target).view
        if view is None:
            for name in op.results[:1]:
                memory.strides[name] = _fresh(op, graph, memory.strides)
            continue
        operand = cast(str, op.operands[0])
        results = view(op, graph.tensor(operand), memory.strides[operand], [graph.tensor(r) for r in op.results])
        if results is not None:
            memory.strides |= dict(zip(op.results, results, strict=True))
            memory.aliases[op.name] = tuple((i, 0) for i in range(len(op.results)))
    return memory


def _fresh(op: Op, graph: Graph, strides: dict[str, Strides]) -> Strides:
    """Strides of a newly made result."""
    shape = graph.tensor(op.results[0]).shape
    order = record(op.target).order
    if isinstance(order, tuple):
        return dense(shape, order) if len(shape) == len(order) else contiguous(shape)
    if order == "operand":
        for operand in op.operands:
            if operand is not None and graph.tensor(operand).shape == shape:
                lying = strides[operand]
                return dense(shape, sorted(range(len(shape)), key=lambda d: -lying[d]))
    return contiguous(shape)
