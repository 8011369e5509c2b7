"""Least cost of a choice beyond the bound, from the reduced costs of a linear program: more than its own.

With dual prices, bound + sum of reduced costs of what a plan uses is at most its objective, and no reduced cost is
below zero. So leaving some out is safe: on a spanning tree of the flows the least sum with node n in choice s is
computed for all n and s in two passes, and a flow outside the tree still adds its least at each end. Several trees give
different bounds; each choice keeps the largest.

    excess(n, s) = min { sum of reduced costs r_j over the columns of a plan with x[n, s] = 1 }
                >= r[n, s] + sum over neighbours m in the tree of min_{s'} ( r_z(s, s') + excess of m's side with s' )

Implemented in `reduced_costs._Tree.least`; the greatest over the trees, in `reduced_costs.excess`. A choice goes where
bound + excess(n, s) > the objective of a known plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common.effort import ROUNDS
from autoshard.solvers.linear_program.rows import Flow, Linear


def excess(model: Linear, reduced: Floats) -> Floats:
    """Seconds beyond the bound that a plan with choice column j costs at the least, shape (model.choices,)."""
    costs = np.append(np.maximum(reduced, 0.0), np.inf)
    tables = [costs[flow.columns] for flow in model.flows]
    node_costs = [costs[a:b] for a, b in zip(model.first[:-1], model.first[1:], strict=True)]
    near: list[list[int]] = [[] for _ in node_costs]
    for f, flow in enumerate(model.flows):
        near[flow.producer].append(f)
        near[flow.consumer].append(f)
    most = costs[: model.choices].copy()
    rng = np.random.default_rng(0)
    for _ in range(ROUNDS):
        np.maximum(most, _Tree(model.flows, tables, near, rng.permutation(len(node_costs))).least(node_costs), out=most)
    return most


class _Tree:
    """A spanning forest, breadth first from the first of `roots` in each part. `up[n]`: the flow to its parent."""

    def __init__(
        self, flows: Sequence[Flow], tables: Sequence[Floats], near: Sequence[Sequence[int]], roots: Integers
    ) -> None:
        self.flows, self.tables, self.near = flows, tables, near
        self.up = [-1] * len(near)
        self.order: list[int] = []
        seen = [False] * len(near)
        for root in roots:
            queue = deque([] if seen[root] else [int(root)])
            seen[root] = True
            while queue:
                n = queue.popleft()
                self.order.append(n)
                for f in near[n]:
                    m = flows[f].consumer if flows[f].producer == n else flows[f].producer
                    if not seen[m]:
                        seen[m] = True
                        self.up[m] = f
                        queue.append(m)
        self.inside = {f for f in self.up if f >= 0}

    def parent(self, n: int) -> int:
        flow = self.flows[self.up[n]]
        return flow.consumer if flow.producer == n else flow.producer

    def least(self, node_costs: Sequence[Floats]) -> Floats:
        below = [cost.copy() for cost in node_costs]
        sent: dict[int, Floats] = {}
        for n in reversed(self.order):
            if self.up[n] >= 0:
                sent[n] = self.message(self.up[n], n, below[n])
                below[self.parent(n)] += sent[n]
        for n in self.order:
            if self.up[n] >= 0:
                above = below[self.parent(n)]
                with np.errstate(invalid="ignore"):
                    remainder = np.where(np.isinf(above), np.inf, above - sent[n])
                below[n] += self.message(self.up[n], self.parent(n), remainder)
        for f, (flow, table) in enumerate(zip(self.flows, self.tables, strict=True)):
            if f not in self.inside:
                below[flow.producer] += table.min(axis=1)[flow.source]
                below[flow.consumer] += table.min(axis=0)[flow.target]
        return np.concatenate(below)

    def message(self, f: int, n: int, costs: Floats) -> Floats:
        """Least costs of the choices at the other end of flow f, for `costs` of those of node n."""
        flow, table = self.flows[f], self.tables[f]
        if flow.producer == n:
            least = np.full(table.shape[0], np.inf)
            np.minimum.at(least, flow.source, costs)
            return np.asarray((table + least[:, None]).min(axis=0)[flow.target])
        least = np.full(table.shape[1], np.inf)
        np.minimum.at(least, flow.target, costs)
        return np.asarray((table + least).min(axis=1)[flow.source])
