"""The program that a package is written from is that of its plan, whether it was kept from the search or lowered."""

from __future__ import annotations

from dataclasses import replace

from autoshard.cluster.hardware import load_hardware
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.package.package_files import build
from autoshard.program.lower import lower
from autoshard.search.build_plan import priced
from autoshard.search.fixed_styles import random_plan
from autoshard.simulation import simulate
from tests.graphs import mlp_graph

HARDWARE, MESH = load_hardware("a100-80g-sxm"), Mesh.parse("dp=2,tp=2")


def is_its_own(plan: Plan, graph: Graph) -> bool:
    made = build(plan, graph, HARDWARE)
    program = lower(plan, graph)
    return made.program == program and made.timeline == simulate(program, graph, HARDWARE)


def test_a_kept_program_is_that_of_the_plan() -> None:
    graph = mlp_graph(2)
    plans = [priced(random_plan(graph, MESH, HARDWARE, seed), graph, HARDWARE) for seed in range(6)]
    assert all(is_its_own(plan, graph) for plan in plans)
    fastest = min(plans, key=lambda plan: plan.predicted_seconds)
    kept = build(fastest, graph, HARDWARE).program
    assert build(replace(fastest, capacity_bytes=1.0), graph, HARDWARE).program is kept  # what is said of it alone
    others = [
        replace(fastest, precision="bf16-mixed"),
        replace(fastest, step=replace(fastest.step, micro_batches=2)),
        replace(fastest, step=replace(fastest.step, zero=1)),
    ]
    for other in others:
        assert is_its_own(other, graph) and build(other, graph, HARDWARE).program is not kept
    slower = replace(HARDWARE, launch_seconds=1.0)
    assert build(fastest, graph, slower).timeline.step_seconds > build(fastest, graph, HARDWARE).timeline.step_seconds
