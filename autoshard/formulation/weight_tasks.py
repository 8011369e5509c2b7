"""What the way of a weight surely costs beside the bytes that its collectives move.

A collective of a weight either goes together with those of the other weights of its block, or runs by itself, in a row.
Together, each weight is copied into or out of what is sent, and the one collective takes longer than its bytes alone by
at least as much as the largest of its members would: the n weights of a block each pay an n-th of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.ir.graph import CAST, Graph
from autoshard.ir.layout import Layout
from autoshard.ir.problem import Floats
from autoshard.program.weight_buckets import block_of
from autoshard.redistribute.way_parts import AGAIN, BACKWARD, FORWARD, GATHER, SUM, WayParts


@dataclass(frozen=True, eq=False)
class WeightTasks:
    """Of one weight, each [source, target]: `issued`, tasks of the host, and `seconds` in a row, by phase: FORWARD,
    BACKWARD, and GATHER for what its backward makes again."""

    issued: dict[str, Floats]
    seconds: dict[str, Floats]


def weight_tasks(
    parts: WayParts, rates: WayParts, copies: dict[str, Floats], sources: Sequence[Layout], stored: bool
) -> WeightTasks:
    """`rates`: the same ways at the seconds that their bytes surely take. `copies`: seconds of copying the whole weight
    (FORWARD) and its gradient (BACKWARD) once, where it is gathered. `stored`: the sums of its gradient go together."""
    alone = parts.goes_alone(sources)
    groups = [seconds > 0 for (phase, axes), seconds in parts.seconds.items() if phase == FORWARD and axes]
    flat = ~alone & (sum(groups, np.zeros(alone.shape)) == 1)
    forward, back, gathered = (_sum(parts, (phase,)) for phase in (FORWARD, BACKWARD, GATHER))
    summed = _sum(rates, (SUM,)) * ((gathered == 0) & (not stored))  # after a gather it may become a reduce-scatter
    copied = np.minimum(copies[FORWARD], gathered) * flat
    seconds = {
        FORWARD: np.where(alone, forward, copied),
        BACKWARD: np.where(alone, _sum(rates, (BACKWARD,)), np.minimum(copies[BACKWARD], back) * flat) + summed,
        GATHER: np.where(alone, _sum(rates, AGAIN), copied),
    }
    issued = {FORWARD: forward > 0, BACKWARD: back + summed > 0, GATHER: gathered > 0}
    return WeightTasks({phase: there.astype(float) for phase, there in issued.items()}, seconds)


def _sum(parts: WayParts, phases: Sequence[str]) -> Floats:
    """Of its collectives over all axes."""
    own = (seconds for (phase, axes), seconds in parts.seconds.items() if phase in phases and axes)
    return sum(own, np.zeros(parts.summed.shape))


def members(graph: Graph) -> dict[str, int]:
    """Weight, and what is cast of it -> how many weights at most go together with it, itself among them. Those alone
    whose readers stand in one block."""
    blocks = {tensor: readers for tensor in graph.weights if (readers := _blocks(graph, tensor))}
    stored = {p.tensor for p in graph.parameters}
    counts: dict[str, int] = {}
    for tensor in stored & blocks.keys():
        for block in blocks[tensor]:
            counts[block] = counts.get(block, 0) + 1
    one = {tensor: next(iter(own)) for tensor, own in blocks.items() if len(own) == 1}
    return {tensor: counts[block] for tensor, block in one.items() if block and block in counts}


def _blocks(graph: Graph, tensor: str) -> set[str]:
    """Of all that read it, or what is cast of it."""
    found: set[str] = set()
    for op, _ in graph.consumers[tensor]:
        found |= _blocks(graph, op.results[0]) if op.target == CAST else {block_of(op.module)}
    return found
