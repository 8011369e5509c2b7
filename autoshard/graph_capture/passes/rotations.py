"""Half of the last dim exchanged with the other, negated, as rotary embeddings have it, is one operator."""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph_capture.passes.rewrite import MARK, rewrite
from autoshard.ir.graph import Graph, Op, Saved

ROTATE_HALF = "autoshard.rotate_half"


def fold_rotations(graph: Graph) -> Graph:
    """`cat((-x[..., n:], x[..., :n]), -1)` of a last dim of 2n, by slices or by a split; these may go dead."""
    return rewrite(graph, [_rotation(op, graph) or op for op in graph.ops])


def _rotation(op: Op, graph: Graph) -> Op | None:
    rank = len(graph.tensor(op.results[0]).shape)
    if op.target != "aten.cat" or len(op.operands) != 2 or op.attribute("dim") != rank - 1 or MARK in op.source:
        return None
    negated = graph.producers.get(op.operands[0] or "")
    if negated is None or negated.target != "aten.neg":
        return None
    second, first = _half(negated.operands[0], graph), _half(op.operands[1], graph)
    if second is None or first is None or (second[0], first[0]) != (first[0], second[0]):
        return None
    if (first[1], second[1]) != (0, 1):
        return None
    return replace(op, target=ROTATE_HALF, operands=(first[0],), attributes=(), saved=Saved())


def _half(name: str | None, graph: Graph) -> tuple[str, int] | None:
    """(tensor, 0 or 1) for a half of its last dim."""
    op = graph.producers.get(name or "")
    source = op.operands[0] if op is not None and op.operands else None
    if op is None or source is None or MARK in op.source:
        return None
    *_, size = graph.tensor(source).shape
    if op.attribute("dim") != len(graph.tensor(source).shape) - 1 if op.target in _HALVES else True:
        return None
    if op.target == "aten.slice":
        bounds = (op.attribute("start"), op.attribute("end"), op.attribute("step"))
        halves = [(0, size // 2, 1), (size // 2, size, 1)]
        return (source, halves.index(bounds)) if bounds in halves and size % 2 == 0 else None
    return (source, op.results.index(str(name))) if op.attribute("split_size") == (size // 2,) * 2 else None


_HALVES = ("aten.slice", "aten.split")
