"""Propagation on small networks, beside what MindSpore's sharding propagation derived for the same pins on 8 devices.

Facts: runs of MindSpore 2.7, search_mode="sharding_propagation", full_batch. `given` and `derived` are cuts per dim of
each operand of an operator, by its place in the graph. Ours must keep the pins and need no more communication than the
listed strategies would with the best choice of everything that they leave open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.cluster.hardware import load_hardware
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture_model
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import Problem, objective
from autoshard.rules.algebra.strategy import Strategy
from autoshard.solvers import portfolio
from autoshard.solvers.heuristics import propagation

Cuts = tuple[tuple[int, ...], ...]
MESH = Mesh.parse("a=2,b=2,c=2")  # 2, 4 and 8 cuts of a dim


class TwoMatmuls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(64, 128)), nn.Parameter(torch.randn(128, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w1) @ self.w2


class Fork(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return torch.sqrt(y) + torch.square(y)


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x), -1)


class Reshape(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(torch.relu(x).reshape(64, 8, 8))


class ReduceSum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(torch.relu(x).sum(0))


@dataclass(frozen=True)
class Case:
    name: str
    network: type[nn.Module]
    given: Mapping[int, Cuts]
    derived: Mapping[int, Cuts]


CASES = [
    Case("m1 2,4", TwoMatmuls, {0: ((2, 1), (1, 4))}, {1: ((2, 4),), 2: ((2, 4), (4, 1))}),
    Case("m1 column", TwoMatmuls, {0: ((1, 1), (1, 8))}, {1: ((1, 8),), 2: ((1, 8), (8, 1))}),
    Case("m1 row", TwoMatmuls, {0: ((2, 4), (4, 1))}, {1: ((2, 1),), 2: ((2, 1), (1, 4))}),
    Case("m2 row", TwoMatmuls, {2: ((1, 8), (8, 1))}, {0: ((1, 1), (1, 8)), 1: ((1, 8),)}),
    Case("m1 part", TwoMatmuls, {0: ((4, 1), (1, 1))}, {1: ((4, 1),), 2: ((4, 1), (1, 2))}),
    Case("sqrt 8,1", Fork, {1: ((8, 1),)}, {0: ((8, 1),), 2: ((8, 1),), 3: ((8, 1), (8, 1))}),
    Case("sqrt 2,4", Fork, {1: ((2, 4),)}, {0: ((2, 4),), 2: ((2, 4),), 3: ((2, 4), (2, 4))}),
    Case("two pins", Fork, {1: ((4, 1),), 2: ((2, 2),)}, {0: ((4, 1),), 3: ((2, 2), (2, 2))}),
    Case("softmax 8,1", Softmax, {0: ((8, 1),)}, {1: ((8, 1),)}),
    Case("softmax 1,8", Softmax, {0: ((1, 8),)}, {1: ((4, 1),)}),
    Case("softmax 2,4", Softmax, {0: ((2, 4),)}, {1: ((2, 1),)}),
    Case("reshape 8,1", Reshape, {0: ((8, 1),)}, {2: ((8, 1, 1),)}),
    Case("reshape 1,8", Reshape, {0: ((1, 8),)}, {2: ((1, 8, 1),)}),
    Case("reshape 2,4", Reshape, {0: ((2, 4),)}, {2: ((2, 4, 1),)}),
    Case("sum 8,1", ReduceSum, {0: ((8, 1),)}, {1: ((8, 1),), 2: ((1,),)}),
    Case("sum 1,8", ReduceSum, {0: ((1, 8),)}, {1: ((1, 8),), 2: ((8,),)}),
    Case("sum 2,4", ReduceSum, {0: ((2, 4),)}, {1: ((2, 4),), 2: ((1,),)}),
]


def formulated(case: Case) -> Formulation:
    graph = capture_model(case.network(), (torch.rand(64, 64),), training=False)
    return formulate(PlanningContext(graph, MESH, load_hardware("a100-80g-sxm")))


def cuts(layout: Layout, rank: int) -> tuple[int, ...]:
    return tuple(int(np.prod([MESH.sizes[a] for a, _ in layout.shards(dim)])) for dim in range(rank))


def matching(formulation: Formulation, wanted: Mapping[int, Cuts]) -> dict[int, list[int]]:
    """Node -> its choices that cut the operands as wanted."""
    choices = {}
    nodes = {site.name: n for n, site in enumerate(formulation.sites) if site.kind == "op"}
    for place, operands in wanted.items():
        op = formulation.graph.ops[place]
        ranks = [len(formulation.graph.tensor(name).shape) for name in op.operands if name is not None]

        def cut(strategy: Strategy, ranks: list[int] = ranks) -> Cuts:
            layouts = [layout for layout in strategy.operands if layout is not None]
            return tuple(cuts(layout, rank) for layout, rank in zip(layouts, ranks, strict=True))

        strategies = formulation.sites[nodes[op.name]].strategies
        choices[nodes[op.name]] = [s for s, strategy in enumerate(strategies) if cut(strategy) == operands]
        assert choices[nodes[op.name]], f"{op.name}: no strategy cuts {operands}"
    return choices


def communication(problem: Problem, allowed: Mapping[int, list[int]]) -> Problem:
    """Only redistributions cost; the nodes in `allowed` may only choose among those."""
    nodes = []
    for n, node in enumerate(problem.nodes):
        free = np.zeros(len(node.seconds))
        if n in allowed:
            free[~np.isin(np.arange(len(free)), allowed[n])] = np.inf
        nodes.append(replace(node, seconds=free))
    return replace(problem, nodes=tuple(nodes))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-").replace(",", "x"))
def test_derived_strategies_communicate_no_more_than_the_listed(case: Case) -> None:
    formulation = formulated(case)
    problem = formulation.problem
    matches = matching(formulation, case.given)
    listed = communication(problem, matching(formulation, {**case.given, **case.derived}))
    at_most = portfolio.solve(listed)
    pinned = {n: at_most.choice[n] for n in matches}
    propagated = propagation.propagate(problem, pinned)
    assert all(propagated.choice[n] == s and propagated.decided[n] == "pinned" for n, s in pinned.items())
    ours = objective(communication(problem, {}), propagated.choice)
    assert ours <= at_most.objective * (1 + 1e-9) + 1e-12


def test_two_pins_that_disagree_make_a_conflict() -> None:
    formulation = formulated(CASES[7])
    matches = matching(formulation, CASES[7].given)
    propagated = propagation.propagate(formulation.problem, {n: some[0] for n, some in matches.items()})
    names = {formulation.sites[conflict.node].name for conflict in propagated.conflicts}
    relu, add = formulation.graph.ops[0].name, formulation.graph.ops[3].name
    assert names & {relu, add}, "between two sqrt and square of different layouts, someone can't please both"
    for conflict in propagated.conflicts:
        assert conflict.taken == propagated.choice[conflict.node] and len(set(conflict.wanted)) > 1
