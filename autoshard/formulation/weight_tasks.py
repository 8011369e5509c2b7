"""Certain costs of a weight's redistribution in addition to the bytes that its collectives move.

A collective of a weight either goes together with those of the other weights of its block, or runs by itself, serially.
Together, each weight is copied into or out of what is sent, and the joint collective takes longer than its bytes alone
by at least as much as the largest of its members would: the n weights of a block each pay an n-th of their own.

All blocks but the one that is used last gather their weights again for backward (`GatheredAgain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.formulation.formulate import Formulation
from autoshard.ir.graph import CAST, Graph
from autoshard.ir.layout import Layout
from autoshard.ir.problem import Floats
from autoshard.program.weight_buckets import block_of
from autoshard.redistribute.path_costs import AGAIN, BACKWARD, FORWARD, GATHER, SUM, PathParts


@dataclass(frozen=True, eq=False)
class WeightTasks:
    """Tasks of one weight, each [source, target]: `issued`, tasks of the host, and serial `seconds`, by phase: FORWARD,
    BACKWARD, and GATHER for what its backward gathers again."""

    issued: dict[str, Floats]
    seconds: dict[str, Floats]


def weight_tasks(
    parts: PathParts, rates: PathParts, copies: dict[str, Floats], sources: Sequence[Layout], stored: bool
) -> WeightTasks:
    """Tasks of one weight. `rates`: redistributions in their bytes' certain seconds. `copies`: seconds to copy the
    whole weight (FORWARD) and its gradient (BACKWARD) once, if gathered. `stored`: its gradient's sums go together."""
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


def _sum(parts: PathParts, phases: Sequence[str]) -> Floats:
    """Seconds of its collectives over all axes."""
    terms = (seconds for (phase, axes), seconds in parts.seconds.items() if phase in phases and axes)
    return sum(terms, np.zeros(parts.summed.shape))


def members(graph: Graph) -> dict[str, int]:
    """Weight, or a cast of it -> the most weights that go together with it, itself included. Only for weights whose
    readers are all in one block."""
    blocks = {tensor: readers for tensor in graph.weights if (readers := _blocks(graph, tensor))}
    stored = {p.tensor for p in graph.parameters}
    counts: dict[str, int] = {}
    for tensor in stored & blocks.keys():
        for block in blocks[tensor]:
            counts[block] = counts.get(block, 0) + 1
    one = {tensor: next(iter(names)) for tensor, names in blocks.items() if len(names) == 1}
    return {tensor: counts[block] for tensor, block in one.items() if block and block in counts}


def _blocks(graph: Graph, tensor: str) -> set[str]:
    """Blocks of all operators that read a tensor, or a cast of it."""
    blocks: set[str] = set()
    for op, _ in graph.consumers[tensor]:
        blocks |= _blocks(graph, op.results[0]) if op.target == CAST else {block_of(op.module)}
    return blocks


class GatheredAgain:
    """Weights that the backward surely gathers again, and their block. `needed`: the operators that the loss depends
    on."""

    def __init__(self, formulation: Formulation, needed: frozenset[str]) -> None:
        self.formulation, self.graph, self.needed = formulation, formulation.graph, needed
        self.values_of: dict[str, list[int]] = {}
        for v, value in enumerate(formulation.values):
            self.values_of.setdefault(value.tensor, []).append(v)

    def is_repeated(self, tensor: str, consumer: int) -> bool:
        """Does the backward of a reader surely repeat a weight's gather? For a cast, if its result's readers do: it is
        repeated with them."""
        site = self.formulation.sites[consumer]
        cast = self.graph.by_op[site.name] if site.kind == "op" and tensor in self.graph.weights else None
        if cast is None or cast.target != CAST:
            return self._is_regathered(tensor, consumer)
        result = cast.results[0]
        values = [self.formulation.problem.values[v] for v in self.values_of.get(result, [])]
        return any(self.is_repeated(result, reader) for value in values for reader in value.consumers)

    def block(self, v: int, position: int) -> str:
        """Block of a weight's only reader, if its backward surely gathers it again, except in the block used last,
        whose weights stay whole; "" for other values. A cast on the way is repeated with it."""
        value, tensor = self.formulation.problem.values[v], self.formulation.values[v].tensor
        consumer = self.formulation.sites[value.consumers[position]]
        if len(value.consumers) != 1 or consumer.kind != "op" or consumer.name not in self.needed:
            return ""
        if self._is_regathered(tensor, value.consumers[position]):
            return block_of(self.graph.by_op[consumer.name].module)
        op = self.graph.by_op[consumer.name]
        cast = tensor in self.graph.weights and op.target == CAST
        after = self.values_of.get(op.results[0], []) if cast else []
        return self.block(after[0], 0) if len(after) == 1 else ""

    def _is_regathered(self, tensor: str, consumer: int) -> bool:
        site = self.formulation.sites[consumer]
        if site.kind != "op" or tensor not in self.graph.weights or self.graph.loss is None:
            return False
        op = self.graph.by_op[site.name]
        return op.target != CAST and any(op.operands[position] == tensor for position in op.saved.operands)
