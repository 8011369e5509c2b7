"""Operators of a graph in a reader's words: an argument in a few letters, the line of code."""

from __future__ import annotations

from autoshard.ir.graph import Attribute, Graph, Op
from autoshard.ir.mesh import MOST_LETTERS


def short(value: Attribute) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"


def described(graph: Graph, op: Op) -> str:
    """Operator in words, with its results' shapes and the line that calls it."""
    shape = " and ".join(str(graph.tensor(name).shape) for name in op.results)
    return f"{op.name} ({op.target}, {shape}) at {line_of(graph, op)}"


def line_of(graph: Graph, op: Op) -> str:
    """Source line in the model's code; a constant has its first reader's."""
    readers = [reader for name in op.results for reader, _ in graph.consumers[name]]
    return next((candidate.source for candidate in (op, *readers) if candidate.source), op.module or "the model")
