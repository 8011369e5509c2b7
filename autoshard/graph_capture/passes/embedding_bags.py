"""Embedding bags as one operator with one result, `autoshard.embedding_bags`.

Operands: table (v, d); ids (b, l), or (n) with offsets (b); a weight for each id, or None; result (b, d).
torch's operator has ids in one row and three results more, which only its backward reads: bags of one length, which
`F.embedding_bag` takes as a matrix, become a matrix again. A last offset repeats the length of the list, and a sparse
gradient has the values of the dense one.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Attribute, Graph, Op, Tensor

BAG = "autoshard.embedding_bags"
_MODES = ("sum", "mean", "max")  # torch's numbers for them


def fold_bags(graph: Graph) -> Graph:
    """Every bag, but those whose other results are read or whose gradient depends on how often an id occurs."""
    ops: list[Op] = []
    tensors: list[Tensor] = []
    for op in graph.ops:
        if op.target == "aten.embedding_bag" and _is_plain(op, graph):
            folded, before = _folded(op, graph)
            ops += [*(view for view, _ in before), folded]
            tensors += [tensor for _, tensor in before]
        else:
            ops.append(op)
    return rewrite(graph, ops, tensors=tensors) if ops != list(graph.ops) else graph


def _is_plain(op: Op, graph: Graph) -> bool:
    returned = {*graph.outputs, graph.loss, *(value for _, value in graph.buffer_updates)}
    read = any(graph.consumers[name] or name in returned for name in op.results[1:])
    return not read and not dict(op.attributes).get("scale_grad_by_freq")


def _folded(op: Op, graph: Graph) -> tuple[Op, list[tuple[Op, Tensor]]]:
    """The bag, and the views in front of it with their results."""
    arguments = dict(op.attributes)
    table, ids, offsets, weights = (*op.operands, None)[:4]
    assert table is not None and ids is not None and offsets is not None
    padding, mode, length = arguments.get("padding_idx"), arguments.get("mode", 0), _length(op, graph)
    assert isinstance(mode, int)
    before: list[tuple[Op, Tensor]] = []
    if length is not None:
        before = [_rows(op, graph.tensor(name), length) for name in (ids, weights) if name is not None]
        ids, offsets = before[0][1].name, None
        weights = None if weights is None else before[1][1].name
    elif arguments.get("include_last_offset"):
        before = [_all_but_last(op, graph.tensor(offsets))]
        offsets = before[0][1].name
    attributes: dict[str, Attribute] = {
        "mode": _MODES[mode],
        "padding_idx": padding % graph.tensor(table).shape[0] if isinstance(padding, int) else None,
    }
    operands = (table, ids, offsets, weights)
    return replace(
        op, target=BAG, operands=operands, attributes=tuple(attributes.items()), results=op.results[:1]
    ), before


def _length(op: Op, graph: Graph) -> int | None:
    """Length of every bag, if the offsets are an `arange` with that step; else None."""
    offsets = graph.producers.get(op.operands[2] or "")
    if offsets is None or offsets.target != "aten.arange" or op.attribute("include_last_offset"):
        return None
    arguments = dict(offsets.attributes)
    length, count = arguments.get("step", 1), graph.tensor(op.operands[1] or "").shape[0]
    bags = graph.tensor(offsets.results[0]).shape[0]
    return length if isinstance(length, int) and not arguments.get("start", 0) and bags * length == count else None


def _rows(op: Op, source: Tensor, length: int) -> tuple[Op, Tensor]:
    """A list as a matrix with a row for each bag."""
    rows = replace(source, name=f"{op.name}_{source.name}_rows", shape=(source.shape[0] // length, length))
    return _view(op, "aten.reshape", source, rows, shape=rows.shape)


def _all_but_last(op: Op, source: Tensor) -> tuple[Op, Tensor]:
    starts = replace(source, name=f"{op.name}_{source.name}_starts", shape=(source.shape[0] - 1,))
    return _view(op, "aten.slice", source, starts, dim=0, start=0, end=starts.shape[0], step=1)


def _view(op: Op, target: str, source: Tensor, view: Tensor, **arguments: Attribute) -> tuple[Op, Tensor]:
    return Op(view.name, target, (source.name,), tuple(arguments.items()), (view.name,), op.module, op.source), view


def dense_gradients(graph: Graph) -> Graph:
    """Every look-up with `sparse=False`; `assumed` says where that was otherwise."""
    sparse = [op for op in graph.ops if dict(op.attributes).get("sparse") is True]
    if not sparse:
        return graph
    changed = rewrite(graph, [_dense(op) if op in sparse else op for op in graph.ops])
    places = dict.fromkeys(f"gradients are dense, sparse=True says nothing{_place(op)}" for op in sparse)
    return replace(changed, assumed=(*graph.assumed, *places))


def _dense(op: Op) -> Op:
    return replace(op, attributes=tuple((n, False if n == "sparse" else value) for n, value in op.attributes))


def _place(op: Op) -> str:
    return f" (in {op.module})" if op.module else f" (at {op.source})" if op.source else ""
