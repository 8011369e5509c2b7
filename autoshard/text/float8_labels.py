"""What of a plan runs in float8, what stays in bfloat16, and why."""

from __future__ import annotations

from autoshard.graph_capture.training.float8_layers import kept_in_bfloat16
from autoshard.ir.graph import Graph
from autoshard.ir.plan import Plan
from autoshard.program.lower import chosen_strategies
from autoshard.rules.algebra.float8_products import PLAIN, UNIT, runs_in_bfloat16

SHARDS = f"a shard has rows or a dim that are no multiple of {UNIT}"
NAMED = 2


def float8_words(plan: Plan, graph: Graph) -> str:
    """`12 of 13 linear layers; in bfloat16 lm_head (no other layer follows: …)`; "" in other precisions."""
    if plan.precision != "fp8-mixed":
        return ""
    marked = [op for op in graph.ops if op.target in PLAIN]
    chosen = chosen_strategies(plan, graph)
    uneven = [op for op in marked if runs_in_bfloat16(graph, op, chosen[op.name], plan.mesh)]
    kept = [*kept_in_bfloat16(graph), *((op, SHARDS) for op in uneven)]
    reasons: dict[str, list[str]] = {}
    for op, reason in kept:
        reasons.setdefault(reason, []).append(op.module or op.name)
    words = f"{len(marked) - len(uneven)} of {len(marked) + len(kept) - len(uneven)} linear layers"
    message = "; ".join(f"{_named(names)} ({reason})" for reason, names in reasons.items())
    words += f"; in bfloat16 {message}" if message else ""
    return f"{words}; no kernel in float8 was measured: the profile's peak, at the efficiency of bfloat16's"


def _named(names: list[str]) -> str:
    """The first, and how many more."""
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
