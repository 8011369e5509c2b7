"""Cost of each choice of a plan in the additive model, and the extra cost of the next best choice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard.costs.operator import compute_seconds
from autoshard.formulation.formulate import Formulation, Site
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout, Shard, largest_shape
from autoshard.ir.local_op import LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Parts
from autoshard.ir.problem import Floats, Problem, Value, memory, target_spans
from autoshard.rules.algebra.strategy import Strategy


def parts(formulation: Formulation, choice: Sequence[int]) -> list[Parts]:
    """Costs of each node; compute and communication of all add up to the objective, memory to the peak."""
    problem = formulation.problem
    moved, alive = _moved(problem, choice), _alive(problem, choice)
    others = alternatives(problem, choice)
    split = Split(formulation)
    result = []
    for n, site in enumerate(formulation.sites):
        chosen = choice[n]
        computed, repeated = (float(array[chosen]) for array in split.seconds(n))
        inside = float(problem.nodes[n].seconds[chosen]) - computed
        name, extra = _runner_up(site, others[n], chosen)
        result.append(Parts(computed, repeated, inside + moved[n], alive[n], name, extra))
    return result


def _runner_up(site: Site, totals: Floats, chosen: int) -> tuple[str, float]:
    """The best other choice and its extra seconds; nothing if no other is possible with the other choices fixed."""
    others = np.where(np.arange(len(totals)) == chosen, np.inf, totals)
    best = int(np.argmin(others))
    if math.isinf(others[best]):
        return "", 0.0
    return str((site.strategies or site.layouts)[best]), float(others[best] - totals[chosen])


def alternatives(problem: Problem, choice: Sequence[int]) -> list[Floats]:
    """For each node, the objective's terms that involve it, under each of its choices with all others fixed."""
    totals = [node.seconds.astype(float) for node in problem.nodes]
    for value in problem.values:
        needed = [int(t[choice[c]]) for c, t in zip(value.consumers, value.targets, strict=True)]
        distinct = sorted(set(needed))
        totals[value.producer] = totals[value.producer] + value.seconds[:, distinct].sum(axis=1)[value.source]
        row = value.seconds[value.source[choice[value.producer]]]
        for position, (consumer, targets) in enumerate(zip(value.consumers, value.targets, strict=True)):
            paid = {t for other, t in enumerate(needed) if other != position}
            unpaid = row.copy()
            unpaid[list(paid)] = 0.0  # made for another consumer anyway
            totals[consumer] = totals[consumer] + unpaid[targets]
    return totals


def _moved(problem: Problem, choice: Sequence[int]) -> list[float]:
    """Seconds of redistributions, each counted at the first consumer that needs it."""
    totals = [0.0] * len(problem.nodes)
    for value in problem.values:
        row = value.seconds[value.source[choice[value.producer]]]
        for target, consumer in _first(value, choice).items():
            totals[consumer] += float(row[target])
    return totals


def _first(value: Value, choice: Sequence[int]) -> dict[int, int]:
    """Target layout -> the first consumer that needs it."""
    consumers: dict[int, int] = {}
    for consumer, targets in zip(value.consumers, value.targets, strict=True):
        consumers.setdefault(int(targets[choice[consumer]]), consumer)
    return consumers


def _alive(problem: Problem, choice: Sequence[int]) -> list[float]:
    """Bytes that each node, and the values kept for it, hold at the moment of the peak."""
    curve = memory(problem, choice)
    now = int(np.argmax(curve)) if len(curve) else 0
    totals = []
    for node, chosen in zip(problem.nodes, choice, strict=True):
        start, stop = node.interval
        totals.append(float(node.bytes[chosen]) if start <= now < stop else 0.0)
    for value in problem.values:
        first = _first(value, choice)
        for target, (start, stop) in target_spans(value, choice).items():
            if start <= now < stop:
                totals[first[target]] += float(value.bytes[target])
    return totals


# --- compute apart from communication -------------------------------------------------------------------------------


class Split:
    """Seconds of computation, and the repeated part of it, for every choice of a node."""

    def __init__(self, formulation: Formulation) -> None:
        self.formulation = formulation
        self._known: dict[tuple[int, ...], tuple[Floats, Floats]] = {}

    def seconds(self, n: int) -> tuple[Floats, Floats]:
        """Per choice of node n: (seconds without the collectives inside, the part of it that other devices repeat)."""
        node, site = self.formulation.problem.nodes[n], self.formulation.sites[n]
        key = (id(node.seconds), *map(id, site.strategies or site.layouts))
        if key not in self._known:
            self._known[key] = self._split(site, node.seconds)
        return self._known[key]

    def _split(self, site: Site, seconds: Floats) -> tuple[Floats, Floats]:
        graph, mesh = self.formulation.graph, self.formulation.mesh
        if site.kind != "op":
            times = np.array([copies(layout, mesh) for layout in site.layouts], dtype=float)
            return seconds, seconds * (1 - 1 / times)
        computed = [
            min(self._computed(graph, site, s), float(t)) for s, t in zip(site.strategies, seconds, strict=True)
        ]
        times = np.array([repeats(strategy, mesh) for strategy in site.strategies], dtype=float)
        return np.array(computed), np.array(computed) * (1 - 1 / times)

    def _computed(self, graph: Graph, site: Site, strategy: Strategy) -> float:
        op, hardware = graph.by_op[site.name], self.formulation.hardware
        operands = tuple(
            None if name is None or layout is None else self._local(name, layout)
            for name, layout in zip(op.operands, strategy.operands, strict=True)
        )
        results = tuple(self._local(name, layout) for name, layout in zip(op.results, strategy.results, strict=True))
        return sum(compute_seconds(hardware, graph, op, operands, results, strategy.variant, strategy.host))

    def _local(self, name: str, layout: Layout) -> LocalTensor:
        tensor = self.formulation.graph.tensor(name)
        shape = largest_shape(tensor.shape, layout, self.formulation.mesh)
        return LocalTensor(shape, tensor.dtype, tensor.requires_grad)


def repeats(strategy: Strategy, mesh: Mesh) -> int:
    """Number of devices that do the same work: the product of the axes assigned to no factor."""
    pairs = zip(strategy.choices, mesh.sizes, strict=True)
    return math.prod(size for choice, size in pairs if choice.kind != "factor")


def copies(layout: Layout, mesh: Mesh) -> int:
    """Number of devices that hold the same part."""
    pairs = zip(layout.placements, mesh.sizes, strict=True)
    return math.prod(size for placement, size in pairs if not isinstance(placement, Shard))
