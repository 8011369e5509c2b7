"""Buffers that the forward replaces: what still needs the old value reads a copy, an operator of the graph.

The new value is written into the buffer where the module that holds it ends. Backward, a block that it recomputes, an
output and another buffer's update may read the old one later. What the new value is itself computed of runs before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoshard.code_text import fresh
from autoshard.graph_capture.training.strides import memory_layout
from autoshard.ir.graph import Graph, Op, Saved
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.operators import record

COPY = "aten.clone"


def keep_overwritten(graph: Graph) -> Graph:
    """Needs `requires_grad` and `Saved`. The copies stand right before the first that reads them."""
    for buffer, new in graph.buffer_updates:
        graph = _with_copies(graph, buffer, new)
    return graph


def _with_copies(graph: Graph, buffer: str, new: str) -> Graph:
    path = next(stored.path for stored in graph.buffers if stored.tensor == buffer)
    old = _OldValue(graph, path.rpartition(".")[0], _sources_of(graph, new))
    readers = {op.name for op in graph.ops if buffer in op.operands and old.is_needed_by(op, buffer)}
    returned = old.ends(buffer)
    if not readers and not returned:
        return graph
    first = next((i for i, op in enumerate(graph.ops) if op.name in readers), len(graph.ops))
    place, module = _place(graph.ops, first, old.holder)
    source = graph.ops[first].source if readers else ""
    copy = fresh(f"{buffer}_before", {*graph.by_name, *graph.by_op})
    copy_op = Op(copy, COPY, (buffer,), (("memory_format", None),), (copy,), module, source)
    ops = [_reading(op, buffer, copy) if op.name in readers else op for op in graph.ops]
    updates = tuple((name, copy if value == buffer else value) for name, value in graph.buffer_updates)
    return replace(
        graph,
        tensors=(*graph.tensors, replace(graph.tensor(buffer), name=copy)),
        ops=(*ops[:place], copy_op, *ops[place:]),
        outputs=tuple(copy if name == buffer else name for name in graph.outputs),
        buffer_updates=updates,
    )


@dataclass(frozen=True)
class _OldValue:
    """The value of a buffer before the forward. `holder`: the module that holds it; `computed_by`: the operators that
    its new value is computed by."""

    graph: Graph
    holder: str
    computed_by: frozenset[str]

    def is_needed_by(self, op: Op, name: str) -> bool:
        """Does `op`, or a reader of its view of `name`, read memory that may be overwritten by then?"""
        if _copies(op, name):
            return False
        saved = op.saved
        if saved.operands or saved.results or saved.extra_bytes or op.name not in self.computed_by:
            return True
        if not _is_inside(self.holder, op.module):  # backward may compute the module again, without the holder
            return True
        views = op.results if _is_view(op, name) else ()
        return any(self.ends(view) or self._read_late(view) for view in views)

    def ends(self, name: str) -> bool:
        """Is it returned, or written into a buffer?"""
        return name in self.graph.outputs or any(name == value for _, value in self.graph.buffer_updates)

    def _read_late(self, view: str) -> bool:
        return any(self.is_needed_by(op, view) for op, _ in self.graph.consumers[view])


def _copies(op: Op, name: str) -> bool:
    """True for a norm that makes new statistics: it is called with copies of the old ones."""
    return record(op.target).statistics and bool(dict(op.attributes).get("training")) and name in op.operands[3:5]


def _is_view(op: Op, name: str) -> bool:
    known = record(op.target)
    return op.operands[:1] == (name,) and (known.view is not None or known.work is Work.VIEW)


def _sources_of(graph: Graph, value: str) -> frozenset[str]:
    makers, wanted = set[str](), {value}
    for op in reversed(graph.ops):
        if not wanted.isdisjoint(op.results):
            makers.add(op.name)
            wanted |= {name for name in op.operands if name is not None}
    return frozenset(makers)


def _place(ops: tuple[Op, ...], first: int, holder: str) -> tuple[int, str]:
    """Position and module of a copy for operator `first`: the innermost module around its reader and the holder, so
    that no block that is recomputed without the holder makes it."""
    reader = ops[first].module if first < len(ops) else ""
    module = _common(holder, reader)
    if reader != module:
        below = reader[len(module) :].lstrip(".").partition(".")[0]
        child = f"{module}.{below}".lstrip(".")
        while first > 0 and _is_inside(ops[first - 1].module, child):
            first -= 1
    return first, module


def _common(left: str, right: str) -> str:
    return ".".join(_equal(left.split("."), right.split(".")))


def _equal(left: list[str], right: list[str]) -> Iterable[str]:
    for one, other in zip(left, right, strict=False):
        if one != other:
            return
        yield one


def _is_inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def _reading(op: Op, buffer: str, copy: str) -> Op:
    return replace(op, operands=tuple(copy if name == buffer else name for name in op.operands))


def note_saved(graph: Graph) -> Graph:
    """`Saved` on every op; needs `requires_grad` on the tensors. What the table lacks keeps its floating operands."""
    aliases = memory_layout(graph).aliases
    return replace(graph, ops=tuple(replace(op, saved=_saved(op, graph, aliases.get(op.name, ()))) for op in graph.ops))


def _saved(op: Op, graph: Graph, aliases: tuple[tuple[int, int], ...]) -> Saved:
    operands = [None if name is None else graph.tensor(name) for name in op.operands]
    results = [graph.tensor(name) for name in op.results]
    if not any(result.requires_grad for result in results):
        return Saved(aliases=aliases)
    saved, kept_results, extra = record(op.target).saves(op, operands, results)
    return Saved(tuple(i for i in saved if i < len(operands) and operands[i] is not None), kept_results, extra, aliases)
