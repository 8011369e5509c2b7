"""Repeated key heads (`unsqueeze`, `expand`, `reshape`, as the transformers library writes them) are one operator."""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph_capture.passes.rewrite import MARK, rewrite
from autoshard.ir.graph import Graph, Op, Saved
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.operators import record


def fold_repeats(graph: Graph) -> Graph:
    """x[:, :, None].expand(..., r, ...).reshape(...) becomes `x.repeat_interleave(r, dim)`; the views may go dead."""
    return rewrite(graph, [_repeat(op, graph) or op for op in graph.ops])


def _repeat(op: Op, graph: Graph) -> Op | None:
    """The reshape as a repetition, if it merges a dim with the one after it, which an expand made of nothing."""
    expand = graph.producers.get(op.operands[0] or "") if op.target == "aten.reshape" else None
    unsqueeze = graph.producers.get(expand.operands[0] or "") if expand and expand.target == "aten.expand" else None
    if expand is None or unsqueeze is None or unsqueeze.target != "aten.unsqueeze":
        return None
    source = unsqueeze.operands[0]
    assert source is not None
    before, after, result = (graph.tensor(x).shape for x in (source, expand.results[0], op.results[0]))
    new = unsqueeze.attribute("dim")
    assert isinstance(new, int)
    dim, times = new % len(after) - 1, after[new % len(after)]
    merged = (*before[:dim], before[dim] * times, *before[dim + 1 :]) if dim >= 0 else ()
    if after != (*before[: dim + 1], times, *before[dim + 1 :]) or result != merged:
        return None
    attributes = (("repeats", times), ("dim", dim), ("output_size", None))
    return replace(op, target="aten.repeat_interleave", operands=(source,), attributes=attributes, saved=Saved())


def fold_shared_heads(graph: Graph) -> Graph:
    """Let attention whose keys and values are repeated alike read them unrepeated: `enable_gqa`.

    Not with a mask: with one, only some of torch's kernels share heads.
    """
    return rewrite(graph, [_shared(op, graph) or op for op in graph.ops])


def _shared(op: Op, graph: Graph) -> Op | None:
    attributes = dict(op.attributes)
    if record(op.target).work is not Work.ATTENTION or attributes.get("enable_gqa"):
        return None
    if op.operands[3:4] not in ((), (None,)):
        return None
    repeats = [graph.producers.get(name or "") for name in op.operands[1:3]]
    if not all(r is not None and _repeats_heads(r, graph) for r in repeats):
        return None
    key, value = (r for r in repeats if r is not None)
    if key.attribute("repeats") != value.attribute("repeats"):
        return None
    operands = (op.operands[0], key.operands[0], value.operands[0], *op.operands[3:])
    return replace(op, operands=operands, attributes=tuple({**attributes, "enable_gqa": True}.items()))


def _repeats_heads(op: Op, graph: Graph) -> bool:
    """True for a repetition of the dim of heads that nothing but one attention reads."""
    if op.target != "aten.repeat_interleave" or len(op.operands) != 1 or MARK in op.source:
        return False
    heads, alone = len(graph.tensor(op.results[0]).shape) - 3, len(graph.consumers[op.results[0]]) == 1
    return op.attribute("dim") == heads and isinstance(op.attribute("repeats"), int) and alone
