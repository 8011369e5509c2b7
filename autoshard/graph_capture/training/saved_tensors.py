"""What autograd keeps of each op until its backward, with an accelerator's kernels (fused attention, byte masks)."""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph_capture.training.strides import memory_layout
from autoshard.ir.graph import Graph, Op, Saved
from autoshard.rules.operators import record


def note_saved(graph: Graph) -> Graph:
    """`Saved` on every op; needs `requires_grad` on the tensors. What the table lacks keeps its floating operands."""
    aliases = memory_layout(graph).aliases
    return replace(graph, ops=tuple(replace(op, saved=_saved(op, graph, aliases.get(op.name, ()))) for op in graph.ops))


def _saved(op: Op, graph: Graph, aliases: tuple[tuple[int, int], ...]) -> Saved:
    operands = [None if name is None else graph.tensor(name) for name in op.operands]
    results = [graph.tensor(name) for name in op.results]
    if not any(result.requires_grad for result in results):
        return Saved(aliases=aliases)
    kept, kept_results, extra = record(op.target).saves(op, operands, results)
    return Saved(tuple(i for i in kept if i < len(operands) and operands[i] is not None), kept_results, extra, aliases)
