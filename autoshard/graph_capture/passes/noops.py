"""Drops the ops that change nothing: each result is its operand. Empty operands of a `cat` are dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Graph, Op, Tensor

_ZERO = ("aten.add", "aten.sub")
_ONE = ("aten.mul", "aten.div")


def drop_noops(graph: Graph) -> Graph:
    """Needs `requires_grad` on the tensors: a detach that stops no gradient is dropped, too."""
    same: dict[str, str] = {}
    ops: list[Op] = []
    for op in map(partial(_without_empty, graph), graph.ops):
        operand = graph.tensor(op.operands[0]) if op.operands and op.operands[0] is not None else None
        noop = operand is not None and len(op.results) == 1 and _is_noop(op, operand, graph.tensor(op.results[0]))
        if operand is not None and noop and not (op.target == "aten.to" and op.results[0] in graph.widened):
            same[op.results[0]] = operand.name
        else:
            ops.append(op)
    return rewrite(graph, ops, same)


def _without_empty(graph: Graph, op: Op) -> Op:
    """`cat` without operands of no elements (a slice past the end), where the dtype stays; of one it is an alias."""
    if op.target != "aten.cat":
        return op
    result = graph.tensor(op.results[0])
    full = tuple(name for name in op.operands if name and prod(graph.tensor(name).shape))
    if len(full) == len(op.operands) or all(graph.tensor(name).dtype != result.dtype for name in full):
        return op
    if len(full) == 1:
        return replace(op, target="aten.alias", operands=full, attributes=())
    return replace(op, operands=full)


def _is_noop(op: Op, operand: Tensor, result: Tensor) -> bool:
    test = _TESTS.get(op.target)
    return test is not None and (operand.shape, operand.dtype) == (result.shape, result.dtype) and test(op, operand)


def _always(op: Op, operand: Tensor) -> bool:
    return True


def _no_gradient(op: Op, operand: Tensor) -> bool:
    return not operand.requires_grad


def _neutral(op: Op, operand: Tensor) -> bool:
    """`n + 0` on integers, `x * 1` on anything: exact. (`x + 0.0` is not: it turns -0.0 into 0.0.)"""
    other = dict(op.attributes).get("other")
    if not isinstance(other, int | float) or isinstance(other, bool):
        return False
    if op.target in _ONE:
        return other == 1
    return other == 0 and "float" not in operand.dtype


_TESTS: dict[str, Callable[[Op, Tensor], bool]] = {
    **dict.fromkeys(("aten.alias", "aten.reshape", "aten.expand", "aten.to", "aten.view", "aten.slice"), _always),
    **dict.fromkeys((*_ZERO, *_ONE), _neutral),
    "aten.detach": _no_gradient,
}


def merge_reshapes(graph: Graph) -> Graph:
    """Every `aten.reshape` reads what no reshape made; the ones between may become dead."""
    origin: dict[str, str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if op.target == "aten.reshape" and op.operands[0] is not None:
            source = origin.get(op.operands[0], op.operands[0])
            origin[op.results[0]] = source
            op = replace(op, operands=(source,))
        ops.append(op)
    return rewrite(graph, ops)
