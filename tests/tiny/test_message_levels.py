"""Messages of whole levels beside the same, node after node; and choices of many nodes in a row beside one by one."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.ir.problem import Floats, Integers
from benchmarks.contest.core_problem import NodeCosts, cheapest, either
from benchmarks.contest.messages import Messages, sweep_order
from benchmarks.contest.presolve import PairGraph

pytestmark = pytest.mark.slow  # benchmarks/contest is not part of autoshard


def graph_of(seed: int) -> tuple[PairGraph, NodeCosts]:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 14))
    sizes = rng.integers(1, 5, count).tolist()
    unary = tuple(rng.random(size) for size in sizes)
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.3]
    edges = {(a, b): rng.random((sizes[a], sizes[b])) * (rng.random() + 0.1) for a, b in pairs}
    return PairGraph(unary, edges), NodeCosts(np.concatenate(unary), np.cumsum(sizes))


class NodeByNode:
    """What `Messages` does, one node at a time, in the same order."""

    def __init__(self, graph: PairGraph, order: Integers) -> None:
        self.graph, self.order = graph, order
        self.around: dict[int, dict[int, Floats]] = {n: {} for n in range(len(graph.unary))}
        for (a, b), cost in graph.edges.items():
            self.around[a][b], self.around[b][a] = cost, cost.T
        self.told = {(m, n): np.zeros(len(graph.unary[n])) for n in self.around for m in self.around[n]}

    def belief(self, n: int) -> Floats:
        return np.asarray(self.graph.unary[n] + sum((self.told[m, n] for m in self.around[n]), start=np.zeros(1)))

    def sweep(self, sign: int) -> float:
        bound = 0.0
        for n in np.argsort(sign * self.order, kind="stable").tolist():
            later = [m for m in self.around[n] if sign * self.order[m] > sign * self.order[n]]
            share = 1 / max(len(later), len(self.around[n]) - len(later), 1)
            belief = self.belief(n)
            bound += belief.min()
            belief = (belief - belief.min()) * share
            for m in later:
                message = (self.around[n][m] + (belief - self.told[m, n])[:, None]).min(axis=0)
                bound += message.min()
                self.told[n, m] = message - message.min()
        return float(bound)

    def rounded(self) -> list[int]:
        choice = [0] * len(self.order)
        for n in np.argsort(self.order, kind="stable").tolist():
            costs = self.graph.unary[n].copy()
            for m, cost in self.around[n].items():
                costs = costs + (self.told[m, n] if self.order[m] > self.order[n] else cost[:, choice[m]])
            choice[n] = int(costs.argmin())
        return choice


@pytest.mark.parametrize("stretch", [1, 2, 64])
@pytest.mark.parametrize("seed", range(30))
def test_levels_tell_what_their_nodes_tell_one_by_one(seed: int, stretch: int) -> None:
    graph, unary = graph_of(seed)
    messages = Messages(graph, stretch)
    order = sweep_order(np.array(list(graph.edges), np.int64).reshape(-1, 2), len(graph.unary), stretch)
    one = NodeByNode(graph, order)
    for _ in range(4):
        assert messages.on(unary) == pytest.approx(one.sweep(1), abs=1e-12)
        assert messages.back(unary) == pytest.approx(one.sweep(-1), abs=1e-12)
        assert messages.rounded(unary).tolist() == one.rounded()
        for n, belief in enumerate(messages.beliefs(unary)):
            np.testing.assert_allclose(belief, one.belief(n), atol=1e-12)


@pytest.mark.parametrize("stretch", [1, 3, 64])
@pytest.mark.parametrize("seed", range(30))
def test_no_edge_joins_two_nodes_of_a_level_and_levels_are_few(seed: int, stretch: int) -> None:
    graph, _ = graph_of(seed)
    order = sweep_order(np.array(list(graph.edges), np.int64).reshape(-1, 2), len(graph.unary), stretch)
    assert all(order[a] != order[b] for a, b in graph.edges)
    chain = np.stack([np.arange(999), np.arange(1, 1000)], axis=1)
    assert sweep_order(chain, 1000, stretch).max() < (1000 if stretch == 1 else max(3, stretch))


@pytest.mark.parametrize("seed", range(20))
def test_cheapest_and_either_are_what_they_are_node_by_node(seed: int) -> None:
    graph, unary = graph_of(seed)
    rng = np.random.default_rng(seed)
    row = np.round(unary.row, 1)  # with equals among them
    costs, width = NodeCosts(row, unary.ends), int(rng.integers(1, 4))
    one, other = (np.array([rng.integers(len(node_costs)) for node_costs in graph.unary]) for _ in range(2))
    chosen, without, both = cheapest(costs, width, one), cheapest(costs, width), either(one, other)
    for n, node_costs in enumerate(costs):
        few = np.argsort(node_costs, kind="stable")[:width]
        assert chosen[n].tolist() == np.union1d(few, one[n : n + 1]).tolist()
        assert without[n].tolist() == sorted(few.tolist())
        assert both[n].tolist() == np.unique([one[n], other[n]]).tolist()
    assert [len(some) for some in chosen] == chosen.sizes.tolist()
