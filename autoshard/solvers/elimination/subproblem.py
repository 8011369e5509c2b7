"""A problem of which few nodes are free: those, the nodes that share a value with them, and what all the rest costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.errors import InfeasibleError
from autoshard.ir.problem import Integers, Problem, Value, target_spans
from autoshard.solvers.elimination.weighted_sum import Additive, charge, unary


@dataclass(frozen=True, eq=False)
class Around:
    """`part`: the problem of `nodes` (indices into the whole) and their values; `cost`: of everything else."""

    part: Problem
    nodes: tuple[int, ...]
    allowed: tuple[Integers, ...]
    cost: float

    def whole(self, choice: Sequence[int], allowed: Sequence[Integers]) -> tuple[int, ...]:
        """A choice of the part with the fixed one of every other node."""
        picked = [int(some[0]) for some in allowed]
        for node, strategy in zip(self.nodes, choice, strict=True):
            picked[node] = strategy
        return tuple(picked)


def around(sum_: Additive, allowed: Sequence[Integers]) -> Around | None:
    """Subproblem; None if more than a few nodes have a choice. InfeasibleError where what is fixed is forbidden."""
    problem = sum_.problem
    free = {n for n, some in enumerate(allowed) if len(some) != 1}
    values = [v for v, value in enumerate(problem.values) if not free.isdisjoint((value.producer, *value.consumers))]
    nodes = sorted(free.union(*((problem.values[v].producer, *problem.values[v].consumers) for v in values)))
    if len(nodes) == len(problem.nodes):
        return None
    index = {node: place for place, node in enumerate(nodes)}
    moved = tuple(
        replace(value, producer=index[value.producer], consumers=tuple(index[c] for c in value.consumers))
        for value in (problem.values[v] for v in values)
    )
    part = replace(problem, nodes=tuple(problem.nodes[n] for n in nodes), values=moved)
    part_allowed = tuple(allowed[n] for n in nodes)
    return Around(part, tuple(nodes), part_allowed, _outside_cost(sum_, index, set(values), allowed))


def _outside_cost(sum_: Additive, inside: Mapping[int, int], values: set[int], allowed: Sequence[Integers]) -> float:
    """The cost of the nodes and values outside, all of which are fixed."""
    problem = sum_.problem
    fixed = [int(some[0]) if len(some) else 0 for some in allowed]
    total = sum(float(unary(sum_, n)[fixed[n]]) for n in range(len(problem.nodes)) if n not in inside)
    total += sum(_cost(sum_, value, fixed) for v, value in enumerate(problem.values) if v not in values)
    if math.isinf(total):
        raise InfeasibleError("the strategies of the nodes that are fixed are forbidden together")
    return total


def _cost(sum_: Additive, value: Value, choice: Sequence[int]) -> float:
    """Seconds and priced bytes of one value under a choice."""
    source = value.source[choice[value.producer]]
    targets = {int(t[choice[c]]) for c, t in zip(value.consumers, value.targets, strict=True)}
    seconds = sum(float(value.seconds[source, target]) for target in targets)
    if math.isinf(seconds):
        return seconds
    spans = target_spans(value, choice) if sum_.cumulative[-1] > 0 else {}
    return sum_.scale * seconds + sum(charge(sum_, span) * float(value.bytes[t]) for t, span in spans.items())
