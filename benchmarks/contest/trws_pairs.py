"""Lower bounds of large pairwise problems by sequential tree-reweighted message passing (Kolmogorov, TPAMI 2006).

A sweep in one direction and one back never lower the bound; at the end it is near that of the tight linear relaxation.
Each sweep also rounds to a plan, node by node. Beliefs, messages, bound as in `relax/trws_layouts`; nodes of a level,
which have no edge between them, all send at once.

    x_n = argmin over x of a_n(x) + sum over m before n of b_mn(x_m, x) + sum over m after n of M_{m -> n}(x)

Implemented in `trws_pairs.Messages._send`, the rounding in `trws_pairs.Messages.rounded`.
"""

from __future__ import annotations

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common import clock
from benchmarks.contest.isolated_nodes import Lonely
from benchmarks.contest.message_levels import LevelSends, MessageLevel, levels
from benchmarks.contest.node_costs import NodeCosts, first_least
from benchmarks.contest.presolve import PairGraph
from benchmarks.contest.sweep_order import STRETCH, sweep_order


class Messages:
    """`into`: all messages in a row; of each edge those to the first of its nodes, then those to the second."""

    def __init__(self, graph: PairGraph, stretch: int = STRETCH) -> None:
        sizes = [len(own) for own in graph.unary]
        self.count = len(sizes)
        joined = {n for edge in graph.edges for n in edge}
        self.lonely = Lonely([n for n in range(len(sizes)) if n not in joined], sizes)
        pairs = np.array(list(graph.edges), np.int64).reshape(-1, 2)
        self.levels, self.hearer = levels(graph, sweep_order(pairs, len(sizes), stretch))
        self.into = np.zeros(len(self.hearer))

    def back(self, unary: NodeCosts) -> float:
        """A sweep from the last node to the first; the lower bound."""
        own = unary.row
        return self.lonely.least(unary) + sum(self._send(own, level, level.back) for level in self.levels[::-1])

    def on(self, unary: NodeCosts) -> float:
        """A sweep from the first node to the last; the lower bound."""
        own = unary.row
        return self.lonely.least(unary) + sum(self._send(own, level, level.on) for level in self.levels)

    def _send(self, unary: Floats, level: MessageLevel, sent: LevelSends) -> float:
        """What a level tells in one direction; what it raises the bound by."""
        clock.check()
        belief = unary[level.slots] + np.bincount(level.hears, self.into[level.heard], len(level.slots))
        least = np.minimum.reduceat(belief, level.begin)
        total = float(least.sum())
        if not len(sent.to):
            return total
        belief = (belief - least[level.node]) * level.share[level.node]
        told = belief[sent.own] - self.into[sent.back]
        message = np.empty(len(sent.to))
        for same in sent.widths:
            each = told[same.own].reshape(-1, len(same.cost)).T
            np.min(same.cost + np.repeat(each, same.heights, axis=1), axis=0, out=message[same.to])
        least = np.minimum.reduceat(message, sent.begin)
        self.into[sent.to] = message - least[sent.edge]
        return total + float(least.sum())

    def beliefs(self, unary: NodeCosts) -> NodeCosts:
        """Of each node what its choices cost with all that it was told."""
        told = np.bincount(self.hearer, self.into, len(unary.row))
        return NodeCosts(unary.row + told, unary.ends)

    def rounded(self, unary: NodeCosts) -> Integers:
        """After `back`: each node's best choice given those before it and the messages of those after it."""
        choice = np.zeros(self.count, np.int64)
        choice[self.lonely.nodes] = self.lonely.best(unary)
        own = unary.row
        for level in self.levels:
            told = np.bincount(level.hears_back, self.into[level.heard_back], len(level.slots))
            costs = own[level.slots] + told
            back = level.back
            if len(back.own):
                first = back.first[back.begin + choice[back.receiver]]
                costs += np.bincount(back.own, back.cost[np.repeat(first, back.choices) + back.below], len(costs))
            choice[level.nodes] = first_least(costs, level.begin, level.node) - level.begin
        return choice
