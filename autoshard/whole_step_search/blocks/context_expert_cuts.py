"""The second axis of the devices that share a block: what it cuts, whatever else its split does.

cp cuts attention along the sequence (context parallelism), ep cuts layers of experts (expert parallelism). All other
operators, and tp, are free on both axes.
"""

from __future__ import annotations

import math

from autoshard.formulation.formulate import Allowed
from autoshard.ir.graph import Graph, Op
from autoshard.ir.layout import Layout, Shard
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.operator_record import Work
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.operators import record

CONTEXT, EXPERT, TENSOR = "cp", "ep", "tp"  # axes of a replica's devices
EXPERTS = "autoshard.experts"


def longest_tokens(graph: Graph) -> int:
    """The longest sequence that attends, in tokens; 0 without attention."""
    return max((_tokens(graph, op) for op in graph.ops if _attends(op)), default=0)


def expert_count(graph: Graph) -> int:
    """What divides the number of experts of every layer that has some; 0 without any."""
    weights = (op.operands[1] for op in graph.ops if op.target == EXPERTS)
    return math.gcd(*(graph.tensor(name).shape[0] for name in weights if name is not None))


def second_cuts(graph: Graph, mesh: Mesh) -> Allowed | None:
    """Strategies that cut what the second axis of `mesh` is for; None of a mesh without one. Where no strategy of an
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
    """On the first axis."""
    own = layout.placements[0] if layout is not None else None
    return isinstance(own, Shard) and own.dim == dim
