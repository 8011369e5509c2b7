"""A path through the graph along which each operator waits for the previous one, forward and backward.

No schedule runs two of its tasks at once, whatever else it overlaps: their total time is a lower bound on the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autoshard.ir.graph import Graph
from autoshard.units import EXACT


@dataclass(frozen=True)
class DependencyPath:
    """`ops` in order; `reads[op]`: the tensor that it reads of the previous op. `needed`: the operators that the loss
    depends on, all if there is none; `grows`: those of them that have a backward."""

    ops: tuple[str, ...]
    reads: dict[str, str]
    needed: frozenset[str]
    grows: frozenset[str]

    @cached_property
    def on(self) -> frozenset[str]:
        return frozenset(self.ops)


def longest(graph: Graph, seconds: Mapping[str, float]) -> DependencyPath:
    """The path to the loss whose operators take longest, all with gradients; to any output if there is no loss.

    Equal layers have equal lengths: whole numbers of ticks (EXACT seconds), without rounding."""
    needed = _ancestors(graph)
    grows = graph.loss is not None
    best: dict[str, tuple[int, str | None, str]] = {}  # op -> (ticks, tensor that it reads, op before)
    for op in graph.ops:
        if op.name not in needed or (grows and not any(graph.tensor(r).requires_grad for r in op.results)):
            continue
        come: tuple[int, str | None, str] = (0, None, "")
        for operand in op.operands:
            producer = graph.producers.get(operand) if operand is not None else None
            passes = producer is not None and (not grows or graph.tensor(str(operand)).requires_grad)
            if producer is not None and passes and best.get(producer.name, come)[0] > come[0]:
                come = (best[producer.name][0], operand, producer.name)
        best[op.name] = (come[0] + 1 + round(seconds.get(op.name, 0.0) / EXACT), come[1], come[2])
    backward = frozenset(best) if grows else frozenset()
    if graph.loss is not None and graph.loss in graph.producers:
        last = graph.producers[graph.loss].name
    else:
        last = max(best, key=lambda name: best[name][0], default="")
    ops: list[str] = []
    reads: dict[str, str] = {}
    while last in best:
        ops.append(last)
        _, tensor, before = best[last]
        if tensor is not None:
            reads[last] = tensor
        last = before
    return DependencyPath(tuple(reversed(ops)), reads, needed, backward)


def _ancestors(graph: Graph) -> frozenset[str]:
    """The operators that the loss depends on; all, without a loss."""
    if graph.loss is None:
        return frozenset(op.name for op in graph.ops)
    wanted, names = {graph.loss}, set()
    for op in reversed(graph.ops):
        if not wanted.isdisjoint(op.results):
            names.add(op.name)
            wanted.update(operand for operand in op.operands if operand is not None)
    return frozenset(names)
