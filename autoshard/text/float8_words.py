"""What of a plan runs in float8, what stays in bfloat16, and why."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.graph_capture.training.float8_layers import kept_in_bfloat16
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import largest_shape
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.plan import Plan
from autoshard.program.lower import chosen_strategies
from autoshard.rules.algebra.float8_products import PLAIN, UNIT, fits

SHARDS = f"a shard has rows or a dim that are no multiple of {UNIT}"
NAMED = 2


def float8_words(plan: Plan, graph: Graph) -> str:
    """`12 of 13 linear layers; in bfloat16 lm_head (no other layer follows: …)`; "" in other precisions."""
    if plan.precision != "fp8-mixed":
        return ""
    marked = [op for op in graph.ops if op.target in PLAIN]
    uneven = _uneven(plan, graph, marked)
    kept = [*kept_in_bfloat16(graph), *((op, SHARDS) for op in uneven)]
    reasons: dict[str, list[str]] = {}
    for op, reason in kept:
        reasons.setdefault(reason, []).append(op.module or op.name)
    words = f"{len(marked) - len(uneven)} of {len(marked) + len(kept) - len(uneven)} linear layers"
    told = "; ".join(f"{_named(names)} ({reason})" for reason, names in reasons.items())
    words += f"; in bfloat16 {told}" if told else ""
    return f"{words}; no kernel in float8 was measured: the profile's peak, at the efficiency of bfloat16's"


def _uneven(plan: Plan, graph: Graph, marked: Iterable[Op]) -> list[Op]:
    """Those whose shards the kernels don't take."""
    strategies = chosen_strategies(plan, graph)

    def local(op: Op, position: int) -> LocalTensor:
        tensor, layout = graph.tensor(op.operands[position] or ""), strategies[op.name].operands[position]
        assert layout is not None
        return LocalTensor(largest_shape(tensor.shape, layout, plan.mesh), tensor.dtype, tensor.requires_grad)

    return [op for op in marked if not fits(local(op, 0), local(op, 1))]


def _named(names: list[str]) -> str:
    """The first, and how many more."""
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
