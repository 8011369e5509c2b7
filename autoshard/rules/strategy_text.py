"""Words for what each axis of a strategy does, as printed and as typed: `column-parallel`, `batch split`."""

from __future__ import annotations

import re
from functools import cache

from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Layout, Shard
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.operators import OPERATORS, record

_BY_KIND = {
    "repeat": "replicated",
    "repeat_partial": "replicated with partial gradients",
    "linear": "partial sums propagated",
}
_BATCH, _DIM, _SPLIT = "batch split", "dim {} split", "split"
_SYNONYMS = {
    "column parallel": ("colwise", "columnwise", "column wise", "colwise parallel", "colwiseparallel", "column split"),
    "row parallel": ("rowwise", "row wise", "rowwise parallel", "rowwiseparallel", "row split"),
    "vocabulary parallel": ("vocab parallel", "vocabulary split"),
    "replicated": ("repeated",),
    "batch split": ("batch parallel", "data parallel", "batch sharded"),
}


def axis_words(op: Op, strategy: Strategy, axis: int, graph: Graph) -> str:
    """Words for what the axis does, `column-parallel`."""
    choice = strategy.choices[axis]
    if choice.kind in _BY_KIND:
        return _BY_KIND[choice.kind]
    known = record(op.target)
    if known.factor_words is not None and choice.factor in known.factor_words:
        return known.factor_words[choice.factor]
    for position, layout in enumerate(strategy.operands):
        dim = _split_dim(layout, axis)
        if dim is not None and known.split_words is not None and (position, dim) in known.split_words:
            return known.split_words[position, dim]
    return _plain_split(op, strategy, axis, graph)


def _plain_split(op: Op, strategy: Strategy, axis: int, graph: Graph) -> str:
    names_layouts = [*zip(op.results, strategy.results, strict=True), *zip(op.operands, strategy.operands, strict=True)]
    for name, layout in names_layouts:
        dim = _split_dim(layout, axis)
        if dim is not None and name is not None:
            return _BATCH if dim == 0 and is_batch(graph, name) else _DIM.format(dim)
    return _SPLIT


def _split_dim(layout: Layout | None, axis: int) -> int | None:
    placement = layout.placements[axis] if layout else None
    return placement.dim if isinstance(placement, Shard) else None


def is_batch(graph: Graph, name: str) -> bool:
    """True if dim 0 is as long as that of the model's first input: the batch, unless another dim is as long."""
    first = graph.tensor(graph.inputs[0]) if graph.inputs else None
    return bool(first and first.shape and graph.tensor(name).shape[0] == first.shape[0])


def plain_words(text: str) -> str:
    """Plain form of the words, `column parallel` for `Column-Parallel`; the printed one of synonyms."""
    words = " ".join(re.sub("[-_]", " ", text.lower()).split())
    return next((printed for printed, others in _SYNONYMS.items() if words in others), words)


@cache
def known_words() -> dict[str, str]:
    """Plain words -> their printed form."""
    said = [*_BY_KIND.values(), _BATCH, _SPLIT, *(_DIM.format(dim) for dim in range(8))]
    for known in OPERATORS.values():
        said += [*(known.split_words or {}).values(), *(known.factor_words or {}).values()]
    return {plain_words(words): words for words in said}
