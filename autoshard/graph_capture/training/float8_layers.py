"""Which linear layers run in float8 under fp8-mixed, and why the others stay in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.graph_capture.passes.rewrite import rewrite
from autoshard.ir.graph import Graph, Op
from autoshard.rules.algebra.float8_products import IN_FLOAT8, UNIT

EXPERTS = "autoshard.experts"
HEAD = "no other layer follows: a head keeps its precision"
ROUTER = "it chooses experts"
GROUPED = "products of experts run in groups"
UNEVEN = f"a dim is no multiple of {UNIT}"
WIDE = "an operand is not bfloat16"


def with_float8(graph: Graph) -> Graph:
    """`graph`, cast to bfloat16, with its linears in float8; as torchao's `Float8Linear` and torchtitan's filters."""
    excluded = {op.name for op, _ in excluded_from_float8(graph)}
    ops = (op if op.name in excluded else replace(op, target=IN_FLOAT8.get(op.target, op.target)) for op in graph.ops)
    return rewrite(graph, ops)


def excluded_from_float8(graph: Graph) -> Iterator[tuple[Op, str]]:
    """Linears and experts that fp8-mixed leaves unchanged, in order, with the reason."""
    follow = graph.once(_followers)
    for op in graph.ops:
        if op.target == EXPERTS:
            yield op, GROUPED
        elif op.target in IN_FLOAT8 and (reason := _reason(graph, op, follow[op.name])):
            yield op, reason


def _reason(graph: Graph, op: Op, follow: frozenset[str]) -> str:
    """ "" where the linear can run in float8."""
    x, weight = (graph.tensor(name) for name in op.operands[:2] if name is not None)
    if not follow:
        return HEAD
    if follow == {ROUTER}:
        return ROUTER
    if (x.dtype, weight.dtype) != ("bfloat16", "bfloat16"):
        return WIDE
    return UNEVEN if any(size % UNIT for size in weight.shape) else ""


def _followers(graph: Graph) -> dict[str, frozenset[str]]:
    """Layers with weights that each linear's result reaches before any other of them; ROUTER for experts that it only
    chooses or weighs."""
    reached: dict[str, set[str]] = {}  # by value
    followers: dict[str, frozenset[str]] = {}
    for op in reversed(graph.ops):
        after: set[str] = set()
        for result in op.results:
            after |= reached.get(result, set())
        layer = op.target in IN_FLOAT8 or op.target in IN_FLOAT8.values()
        if layer:
            followers[op.name] = frozenset(after)
        for position, name in enumerate(op.operands):
            if name is not None:
                layers = {op.name} if layer else after
                if op.target == EXPERTS:
                    layers = {ROUTER} if position > 2 else {op.name}
                reached.setdefault(name, set()).update(layers)
    return followers
