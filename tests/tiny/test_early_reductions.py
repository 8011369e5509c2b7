"""Reductions of an input's gradient that start beside a weight product: which they are, and what the timeline shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Collective, Program
from autoshard.program.early_reductions import early_linears
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.module_scopes import operands_of
from autoshard.program.program_check import check
from autoshard.search.build_plan import Origin, plan_of
from autoshard.simulation import simulate
from autoshard.simulation.timeline import Event
from autoshard.solvers.common.result import Solution
from autoshard.solvers.heuristics.random_plans import random_choice
from tests.graphs import mlp_graph

QUIET = {"overlap.slowdown": 0.0, "host.dispatch": 0.0}


def made() -> tuple[Graph, Hardware, Formulation]:
    graph, hardware = mlp_graph(layers=4, batch=4096, hidden=2048), load_hardware("h100-80g-sxm")
    return graph, hardware, formulate(PlanningContext(graph, Mesh.parse("dp=2,tp=2"), hardware))


def programs(count: int = 12) -> list[Program]:
    """Of random plans, those with early reductions."""
    graph, _, formulation = made()
    early = []
    for seed in range(count):
        solution = Solution(formulation.problem, tuple(random_choice(formulation.problem, seed)), 0.0, "random")
        plan = plan_of(formulation, solution, Origin("test"), 1e18, "test")
        program = lower(plan, graph)
        check(program, graph, chosen_strategies(plan, graph))
        early += [program] if early_linears(program.instructions) else []
    return early


def in_a_row(program: Program) -> Program:
    steps = (replace(s, early=False) if isinstance(s, Collective) else s for s in program.instructions)
    return replace(program, instructions=tuple(steps))


def test_they_are_those_that_a_linear_reads_at_once_and_whose_gradient_is_a_sum() -> None:
    """A weight cut along its outputs leaves a sum, one along its inputs does not; nor does one of the data."""
    kinds = set()
    for program in programs():
        for linear, start in early_linears(program.instructions).items():
            step = program.instructions[start]
            assert isinstance(step, Collective)
            kinds.add(step.backward)
            operands = operands_of(program.instructions[linear])
            assert operands[0] == step.result and program.value(operands[1] or "").requires_grad
            assert step.operand not in {p.value for p in program.parameters}
    assert kinds == {"all_reduce", "reduce_scatter"}


def of(events: tuple[Event, ...], index: int) -> list[Event]:
    return [event for event in events if event.phase == "backward" and event.instruction == index]


def test_each_runs_beside_the_weight_product_and_no_other_and_is_waited_for() -> None:
    graph, hardware, _ = made()
    for program in programs():
        events = simulate(program, graph, hardware).events
        for linear, start in early_linears(program.instructions).items():
            *_, data, weight = of(events, linear)
            reduction = of(events, start)[-1]
            assert reduction.start_seconds >= data.end_seconds
            assert weight.start_seconds == pytest.approx(data.end_seconds, abs=1e-4)  # the host issues the reduction
            later = [e for e in events if e.start_seconds > weight.start_seconds and e.stream == "compute"]
            both = max(weight.end_seconds, reduction.end_seconds)
            assert all(e.start_seconds >= both - 1e-12 for e in later if e is not weight and e.instruction != start)


def test_it_gains_what_is_hidden_and_never_costs() -> None:
    graph, hardware, _ = made()
    quiet = replace(hardware, constants=tuple((key, QUIET.get(key, x)) for key, x in hardware.constants))
    gained = []
    for program in programs():
        early, plain = (simulate(p, graph, quiet).step_seconds for p in (program, in_a_row(program)))
        gained.append(plain - early)
    assert min(gained) >= -1e-12 and max(gained) > 1e-5
