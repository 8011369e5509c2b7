"""Lower bounds of large pairwise problems by sequential tree-reweighted message passing (Kolmogorov, TPAMI 2006).

A sweep in one direction and one back never lower the bound; at the end it is near that of the tight linear relaxation.
Each sweep also rounds to a plan, node by node. Beliefs, messages and bound as in `common/trws`.

    x_n = argmin over x of a_n(x) + sum over m before n of b_mn(x_m, x) + sum over m after n of M_{m -> n}(x)

Implemented in `trws_pairs.Messages._sweep`, the rounding in `trws_pairs.Messages.rounded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from autoshard.ir.problem import Floats, Integers
from autoshard.solvers.common import clock
from autoshard.solvers.common.trws import send_messages
from autoshard.solvers.pairwise.isolated_nodes import Lonely
from autoshard.solvers.pairwise.presolve import PairGraph

_Sent = tuple[int, int, int, Floats]  # neighbour, row there, row here, cost (own choices, its choices)


def _message(own: Floats, edge: _Sent, belief: Floats) -> Floats:
    """From a node with the messages `own`."""
    least: Floats = (edge[3] + (belief - own[edge[2]])[:, None]).min(axis=0)
    return least


class Messages:
    """Nodes in their order. `into[n]`: for each edge of n its message to n, a row each (edges of n, choices)."""

    def __init__(self, graph: PairGraph) -> None:
        count = len(graph.unary)
        self.sizes = [len(own) for own in graph.unary]
        before: list[list[tuple[int, Floats]]] = [[] for _ in range(count)]
        after: list[list[tuple[int, Floats]]] = [[] for _ in range(count)]
        for (a, b), cost in sorted(graph.edges.items(), key=lambda pair: pair[0]):
            after[a].append((b, np.ascontiguousarray(cost)))
            before[b].append((a, np.ascontiguousarray(cost.T)))
        self.before, self.after = before, after  # neighbour, cost (own choices, its choices)
        self.into = [np.zeros((len(before[n]) + len(after[n]), self.sizes[n])) for n in range(count)]
        place: list[dict[int, int]] = [
            {other: i for i, (other, _) in enumerate(before[n] + after[n])} for n in range(count)
        ]
        self.send_back = [[(o, place[o][n], place[n][o], cost) for o, cost in before[n]] for n in range(count)]
        self.send_on = [[(o, place[o][n], place[n][o], cost) for o, cost in after[n]] for n in range(count)]
        self.share = [1.0 / max(len(b), len(a), 1) for b, a in zip(before, after, strict=True)]
        self.joined = [n for n in range(count) if before[n] or after[n]]
        self.lonely = Lonely([n for n in range(count) if not (before[n] or after[n])], self.sizes)

    def back(self, unary: Sequence[Floats]) -> float:
        """A sweep from the last node to the first; the lower bound."""
        return self.lonely.least(unary) + self._sweep(unary, self.joined[::-1], self.send_back)

    def on(self, unary: Sequence[Floats]) -> float:
        """A sweep from the first node to the last; the lower bound."""
        return self.lonely.least(unary) + self._sweep(unary, self.joined, self.send_on)

    def _sweep(self, unary: Sequence[Floats], nodes: Sequence[int], send: list[list[_Sent]]) -> float:
        total = 0.0
        for n in nodes:
            clock.check()
            belief = self.into[n].sum(axis=0)
            belief += unary[n]
            total += send_messages(belief, self.share[n], send[n], partial(_message, self.into[n]), self._keep)
        return total

    def _keep(self, edge: _Sent, message: Floats) -> None:
        self.into[edge[0]][edge[1]] = message

    def rounded(self, unary: Sequence[Floats]) -> Integers:
        """After `back`: each node's best choice given those before it and the messages of those after it."""
        choice = np.zeros(len(self.sizes), np.int64)
        for n in self.lonely.nodes:
            choice[n] = unary[n].argmin()
        for n in self.joined:
            costs = unary[n] + self.into[n][len(self.before[n]) :].sum(axis=0)
            for other, cost in self.before[n]:
                costs = costs + cost[:, choice[other]]
            choice[n] = int(np.argmin(costs))
        return choice
