"""The second axis, next to tp, of the devices that share a block: cp splits attention along the sequence (context
parallelism), ep splits layers of experts (expert parallelism). What it splits, and where it may pay.

All other operators, and tp, are free on both axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autoshard.formulation.formulate import Allowed
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Layout, Shard
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.operators import record
from autoshard.step_corrections.shared_sequences import LEAST_TOKENS, shared_sequences

CONTEXT, EXPERT, TENSOR = "cp", "ep", "tp"  # axes of a replica's devices
EXPERTS = "autoshard.experts"
Sizes = tuple[int, ...] | None  # None: as they are offered


def longest_tokens(graph: Graph) -> int:
    """Longest sequence with attention, in tokens; 0 without attention."""
    return max((_tokens(graph, op) for op in graph.ops if _attends(op)), default=0)


def expert_count(graph: Graph) -> int:
    """Greatest common divisor of the numbers of experts of all expert layers; 0 without any."""
    weights = (op.operands[1] for op in graph.ops if op.target == EXPERTS)
    return math.gcd(*(graph.tensor(name).shape[0] for name in weights if name is not None))


def second_cuts(graph: Graph, mesh: Mesh) -> Allowed | None:
    """Strategies that split what the second axis of `mesh` is for; None for a mesh without one. If no strategy of an
    operator does, all of them stay."""
    name = mesh.names[0]
    if name not in (CONTEXT, EXPERT):
        return None
    most = longest_tokens(graph)

    def allowed(op: Op, strategy: Strategy) -> bool:
        if name == EXPERT and op.target == EXPERTS:
            return _cuts(strategy.operands[1], 0)
        if name == CONTEXT and _attends(op) and _tokens(graph, op) == most:
            return _cuts(strategy.results[0], len(graph.tensor(op.results[0]).shape) - 2)
        return True

    return allowed


def _attends(op: Op) -> bool:
    return record(op.target).work is Work.ATTENTION


def _tokens(graph: Graph, op: Op) -> int:
    query = op.operands[0]
    return graph.tensor(query).shape[-2] if query is not None else 0


def _cuts(layout: Layout | None, dim: int) -> bool:
    """Does the layout split `dim` on the first axis?"""
    placement = layout.placements[0] if layout is not None else None
    return isinstance(placement, Shard) and placement.dim == dim


def shared_experts(devices: int, experts: int) -> list[int]:
    """Numbers of devices that may share the experts: 1, and powers of two that divide both."""
    counts = (2**n for n in range(devices.bit_length()))
    return [n for n in counts if n == 1 or (experts and math.gcd(devices, experts) % n == 0)]


def unsearched(context: Sizes, expert: Sizes, offered: tuple[int, int]) -> Iterator[str]:
    """Second axes that may pay and were not asked for."""
    tokens, experts = offered
    if context == (1,) and tokens >= 2 * LEAST_TOKENS:
        yield "cp in addition to tp, for long sequences: --context-parallel auto searches it, too"
    if expert == (1,) and len(shared_experts(experts, experts)) > 1:
        yield "ep in addition to tp, for experts: --expert-parallel auto searches it, too"


def _named(cp: int, ep: int) -> str:
    return f"{CONTEXT}={cp}" if cp > 1 else f"{EXPERT}={ep}"


def second_axes(
    devices: int,
    apart: Callable[[int], bool],
    context: Sizes,
    expert: Sizes,
    offered: tuple[int, int],
    no: Callable[[str], None],
) -> Iterator[tuple[int, int]]:
    """Pairs (devices of cp, devices of ep) that divide `devices`, at least one of them 1; those of `offered` (tokens,
    experts) if sizes are None. Sizes that tp has as well, those not `apart`, are not offered."""
    tokens, experts = offered
    long = [n for n in shared_sequences(devices, tokens) if n == 1 or apart(n)]
    many = [n for n in shared_experts(devices, experts) if n == 1 or apart(n)]
    for cp in long if context is None else context:
        for ep in many if expert is None else expert:
            if cp > 1 and ep > 1:
                if context is not None and expert is not None:
                    no(f"cp={cp} and ep={ep}: only one axis in addition to tp shares a block")
                continue
            if devices % (cp * ep):
                no(f"what stages and tp leave of the devices, {devices}, is not divided by {_named(cp, ep)}")
                continue
            yield cp, ep
