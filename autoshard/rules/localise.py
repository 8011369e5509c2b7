"""Local call of an operator on a shard: attributes as local sizes, or a variant of the runtime in its place."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.rules.algebra.argument_rules import Local, LocalAttribute
from autoshard.rules.algebra.strategy import Strategy
from autoshard.rules.operator_table import instance
from autoshard.rules.operators import VARIANTS, random_index, record


@dataclass(frozen=True)
class LocalCall:
    """`variant` is "" or the runtime function to call as `variant(*operands, **attributes, **axes)`."""

    target: str
    attributes: tuple[tuple[str, LocalAttribute], ...]
    variant: str = ""
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()


def localise(graph: Graph, op: Op, strategy: Strategy, mesh: Mesh) -> LocalCall:
    """Local call of `op` under `strategy`: sizes that an axis shards are LocalSize, all others plain."""
    local = Local(graph, op, instance(graph, op), strategy, mesh, random_index(graph, op))
    if strategy.variant:
        attributes, axes = VARIANTS[strategy.variant].localise(local)
        return LocalCall(op.target, tuple(attributes.items()), strategy.variant, axes)
    function = record(op.target).localise
    changed = function(local) if function else {}
    return LocalCall(op.target, tuple((name, changed.get(name, value)) for name, value in op.attributes))
