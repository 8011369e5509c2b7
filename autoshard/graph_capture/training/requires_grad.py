"""Which values autograd computes a gradient for."""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.graph import Graph, Op
from autoshard.rules.operators import record


def mark_gradients(graph: Graph) -> Graph:
    """`requires_grad` on every tensor, when training: what autograd computes the gradient of.

    Trainable parameters, inputs that require a gradient, and what is computed from one, as far as the loss depends on
    it: a parameter that it does not depend on has no gradient, and no optimizer moves it.
    """
    marked = _reached(graph)
    return _marked(graph, marked & _behind(graph, graph.loss) if graph.loss is not None else marked)


def mark_reached(graph: Graph) -> Graph:
    """`requires_grad` as the forward has it: on all that is computed from a trainable parameter."""
    return _marked(graph, _reached(graph))


def _marked(graph: Graph, marked: set[str]) -> Graph:
    return replace(graph, tensors=tuple(replace(t, requires_grad=t.name in marked) for t in graph.tensors))


def _reached(graph: Graph) -> set[str]:
    marked = {p.tensor for p in graph.parameters if p.trainable and graph.training}
    marked |= {name for name in graph.inputs if graph.tensor(name).requires_grad and graph.training}
    for op in graph.ops:
        if not record(op.target).no_gradient and any(operand in marked for operand in op.operands):
            marked.update(result for result in differentiable(op) if "float" in graph.tensor(result).dtype)
    return marked


def differentiable(op: Op) -> tuple[str, ...]:
    return op.results[:1] if record(op.target).statistics else op.results


def _behind(graph: Graph, loss: str) -> set[str]:
    """Values on which the loss depends through operators that have a gradient."""
    reached = {loss}
    for op in reversed(graph.ops):
        if not record(op.target).no_gradient and not reached.isdisjoint(differentiable(op)):
            reached.update(operand for operand in op.operands if operand is not None)
    return reached
