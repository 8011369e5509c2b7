"""The elimination order, and with it the size of every table, before anything is computed.

Greedy, by one of two keys: the smallest joint table ("size"), or the smallest tables left behind ("left": around
gates a small joint table may leave one over all that the gate keeps apart). Ties go
to the variable whose neighbourhood is least eliminated, so that repeated blocks are all folded before any two are
joined, then to the lowest index.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.solvers.common.clock import Pace
from autoshard.solvers.elimination.cost_tables import CostTerm, Store
from autoshard.solvers.elimination.factor_graph import EliminationStep, TermGraph

Key = Literal["size", "left"]
_Priority = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Elimination:
    """`tables`: numbers of the distinct tables to compute, in order; `constants`: the tables without axes, whose sum is
    the minimum. `entries`: their sizes; `work`: entries of all joint tables that are minimised; `largest`: of one.
    `left`: the terms over the other variables.
    """

    domains: tuple[int, ...]
    steps: tuple[EliminationStep, ...]
    tables: tuple[int, ...]
    constants: tuple[int, ...]
    entries: int
    work: int
    largest: int
    exact: bool
    left: tuple[CostTerm, ...] = ()


def plan(
    store: Store,
    terms: Sequence[CostTerm],
    domains: Sequence[int],
    key: Key,
    *,
    gates: Collection[int] = (),
    limit: float = float("inf"),
    most_work: float = float("inf"),
    variables: Collection[int] | None = None,
) -> Elimination | None:
    """Eliminates `variables` (all, if not given) in greedy order; None as soon as that takes more than `most_work`.

    With a `limit`, larger joint tables are split into mini-buckets: a lower bound, and `exact` is False.
    """
    graph = TermGraph(store, terms, domains, gates)
    costs: dict[int, int] = {}  # of eliminating each variable next
    current = {v: _priority(graph, v, key, costs) for v in (range(len(domains)) if variables is None else variables)}
    heap = list(current.values())
    heapq.heapify(heap)
    pace = Pace(len(current))
    while heap:
        pace.step(len(graph.steps))
        priority = heapq.heappop(heap)
        variable = priority[-1]
        if current.get(variable) != priority:
            continue
        del current[variable]
        if graph.work + costs[variable] > most_work:
            return None
        around = graph.neighbours(variable)
        graph.eliminate(variable, limit)
        for touched in around & current.keys():
            renewed = _priority(graph, touched, key, costs)
            if current[touched] != renewed:
                current[touched] = renewed
                heapq.heappush(heap, renewed)
    return Elimination(
        domains=graph.domains,
        steps=tuple(graph.steps),
        tables=tuple(graph.tables),
        constants=tuple(graph.constants),
        entries=graph.entries,
        work=graph.work,
        largest=graph.largest,
        exact=graph.exact,
        left=tuple(graph.terms.values()),
    )


def _priority(graph: TermGraph, variable: int, key: Key, costs: dict[int, int]) -> _Priority:
    """Notes the cost, too."""
    costs[variable] = graph.cost(variable)
    level = (graph.left(variable) if key == "left" else costs[variable]).bit_length()
    return level, graph.generation[variable], variable
