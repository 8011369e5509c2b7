"""A plan carried over to other sizes makes the same decisions."""

from __future__ import annotations

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import UsageError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan_json import dumps, loads
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.program_check import check
from autoshard.replay.resize import reapply
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests.graphs import mlp_graph

HARDWARE = load_hardware("a100-80g-sxm")
FULL, REDUCED = mlp_graph(layers=4, batch=32, hidden=64), mlp_graph(layers=2, batch=8, hidden=16)


def test_the_same_graph_gets_the_same_plan_back():
    plan = random_plan(FULL, Mesh.parse("dp=2,tp=2"), HARDWARE, seed=3)
    assert reapply(plan, FULL, FULL, HARDWARE).ops == plan.ops
    assert lower(reapply(plan, FULL, FULL, HARDWARE), FULL) == lower(plan, FULL)


@pytest.mark.parametrize("seed", range(5))
def test_fewer_layers_keep_the_strategies_and_steps_of_those_that_stay(seed):
    mesh = Mesh.parse("dp=2,tp=2")
    plan = random_plan(FULL, mesh, HARDWARE, seed)
    smaller = reapply(plan, FULL, REDUCED, HARDWARE)
    check(lower(smaller, REDUCED), REDUCED, chosen_strategies(smaller, REDUCED))
    decided = {op.op: op.strategy for op in plan.ops}
    assert all(decided[op.op] == op.strategy for op in smaller.ops)
    stored = {parameter.path: parameter.layout for parameter in plan.parameters}
    assert all(stored[parameter.path] == parameter.layout for parameter in smaller.parameters)


@pytest.mark.parametrize("style", ["best", "random"])
def test_a_plan_without_all_to_all_stays_one(style):
    mesh = Mesh.parse("dp=2,tp=2")
    if style == "best":
        plan = search(FULL, HARDWARE, SearchRequest(mesh, all_to_all=False))
    else:
        plan = random_plan(FULL, mesh, HARDWARE, seed=1, all_to_all=False)
    smaller = reapply(plan, FULL, REDUCED, HARDWARE)
    for own in (plan, loads(dumps(plan)), smaller):
        assert not own.search.all_to_all
        actions = {action for r in own.redistributions for s in r.steps for action in (s.forward, s.backward)}
        assert (actions or style == "best") and not actions & {"all_to_all", "exchange"}
    assert style == "best" or _exchanges(random_plan(FULL, mesh, HARDWARE, seed=1))  # where they are not forbidden


def _exchanges(plan):
    return any(step.forward in ("all_to_all", "exchange") for r in plan.redistributions for step in r.steps)


def test_more_layers_than_the_plan_has_are_refused():
    plan = search(REDUCED, HARDWARE, SearchRequest(Mesh.parse("dp=2")))
    with pytest.raises(UsageError, match="no counterpart at full size"):
        reapply(plan, REDUCED, FULL, HARDWARE)
