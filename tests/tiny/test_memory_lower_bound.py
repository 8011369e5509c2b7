"""The least that every program of a mesh holds: below each moment of each program, and what is said by it."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.errors import InfeasibleError, UsageError
from autoshard.estimate.transformer import Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.formulation.fewer_choices import narrowed
from autoshard.formulation.formulate import Formulation, formulate
from autoshard.formulation.memory_bound.memory_lower_bound import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    floors,
    memory_lower_bound,
)
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir import graph_json
from autoshard.ir.graph import Graph, Op, Saved, Tensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.problem import objective
from autoshard.ir.program import Compute, Program
from autoshard.program.lower import lower
from autoshard.search.build_plan import Origin, plan_of
from autoshard.search.fixed_step import predicted
from autoshard.search.mesh_search import of_all_meshes
from autoshard.search.search_request import SearchRequest
from autoshard.search.search_task import prepare
from autoshard.search.select_plan import search
from autoshard.simulation.memory_curve import MemoryPlan, plan_memory
from autoshard.solvers.common.local_search import Choice
from autoshard.solvers.common.result import FalseProof, Solution, fits, none_within
from autoshard.solvers.heuristics.random_plans import random_choice
from autoshard.workflow import make_plan
from tests.graphs import mlp_graph
from tests.slow import quick_at

HARDWARE = load_hardware("h100-80g-sxm")
MESHES = ("a=2,b=3", "a=4", "dp=2,tp=2")


def viewed(graph: Graph) -> Graph:
    """With two views of one storage that backward keeps, of which one is larger than it."""
    rows, width = graph.tensor("relu_0").shape
    tensors = [
        Tensor("base", (rows, width), "float32", True),
        Tensor("turned", (width, rows), "float32", True),
        Tensor("back", (rows, width), "float32", True),
        Tensor("wide", (3, rows, width), "float32", True),
        Tensor("squares", (3, rows, width), "float32", True),
        Tensor("total", (), "float32", True),
        Tensor("both", (), "float32", True),
    ]
    ops = [
        Op("base", "aten.add", ("relu_0", "x"), (), ("base",), "", "a.py:0"),
        Op("turned", "aten.permute", ("base",), (("dims", (1, 0)),), ("turned",), "", "a.py:1"),
        Op("back", "aten.permute", ("turned",), (("dims", (1, 0)),), ("back",), "", "a.py:2"),
        Op("wide", "aten.expand", ("back",), (("size", (3, rows, width)),), ("wide",), "", "a.py:3"),
        Op("squares", "aten.mul", ("wide", "wide"), (), ("squares",), "", "a.py:4", Saved((0, 1))),
        Op("total", "aten.sum", ("squares",), (), ("total",), "", "a.py:5"),
        Op("both", "aten.add", ("loss", "total"), (), ("both",), "", "a.py:6"),
    ]
    whole = replace(graph, tensors=(*graph.tensors, *tensors), ops=(*graph.ops, *ops))
    return replace(whole, outputs=("both",), loss="both")


def small_transformer(precision: str, optimizer: str, **other: object) -> Graph:
    model = Transformer(1, 32, 4, 16, 64, **other)  # type: ignore[arg-type]
    return transformer_graph(model, 4, precision, optimizer).graph


def without_loss() -> Graph:
    graph = mlp_graph(2)
    tensors = tuple(t for t in graph.tensors if t.name not in ("loss", "y"))
    return replace(graph, loss=None, ops=graph.ops[:-1], outputs=("relu_1",), inputs=("x",), tensors=tensors)


GRAPHS = {
    "mlp": mlp_graph(2),
    "views": viewed(mlp_graph(1, 64, 4)),
    "bf16": small_transformer("bf16-mixed", "adamw", fp32_loss=True),
    "products": small_transformer("fp32", "sgd", attention="products", dropout=True),
    "experts": small_transformer("bf16-mixed", "adamw", experts=4, norm="rms_norm", activation="swiglu"),
    "no loss": without_loss(),
}


def program_of(formulation: Formulation, choice: Choice) -> tuple[Program, MemoryPlan]:
    plan = plan_of(formulation, Solution(formulation.problem, choice, 0.0, "test"), Origin("test"), 1e18, "test")
    program = lower(plan, formulation.graph)
    return program, plan_memory(program, formulation.graph)


def some(formulation: Formulation, count: int) -> Iterator[Choice]:
    """Random choices, and some with a few changes."""
    draw = random.Random(0)
    for seed in range(count):
        choice = list(random_choice(formulation.problem, seed))
        for n in draw.sample(range(len(choice)), 3):
            old, choice[n] = choice[n], draw.randrange(len(formulation.problem.nodes[n].seconds))
            if math.isinf(objective(formulation.problem, choice)):
                choice[n] = old
        yield tuple(choice)


@pytest.mark.parametrize(
    ("name", "mesh"), quick_at(list(zip(GRAPHS, itertools.cycle(MESHES), strict=False)), 0, 1, 4, 5)
)
def test_no_moment_of_a_program_has_less(name: str, mesh: str) -> None:
    """Of a single plan: every moment of its own program. And the least over all plans is below each program's peak."""
    formulation = formulate(PlanningContext(GRAPHS[name], Mesh.parse(mesh), HARDWARE))
    least, near = memory_lower_bound(formulation).bytes, 0.0
    for choice in some(formulation, 3):
        program, memory = program_of(formulation, choice)
        at = {step.op: i for i, step in enumerate(program.instructions) if isinstance(step, Compute)}
        alone = list(floors(narrowed(formulation, {n: [s] for n, s in enumerate(choice)})))
        for floor in alone:
            last, forward = len(memory.bytes) - 1, at.get(floor.op, 0)
            step = {
                FORWARD: forward,
                BACKWARD: last - 2 - forward if program.has_backward else forward,
                OPTIMIZER: last,
            }
            assert floor.bytes <= memory.bytes[step[floor.phase]] * (1 + 1e-9), (floor, choice)
        peak = max(memory.bytes)
        assert least <= max(floor.bytes for floor in alone) * (1 + 1e-9) <= peak * (1 + 2e-9)
        near = max(near, max(floor.bytes for floor in alone) / peak)
    assert near > 0.6, "a bound that says nothing"


@pytest.mark.parametrize("seed", quick_at(range(3), 1))
def test_below_the_least_of_all_programs(seed: int) -> None:
    """Brute force over what two random choices of each node leave."""
    whole = formulate(PlanningContext(mlp_graph(1, 4, 8), Mesh.parse("a=2"), HARDWARE))
    pair = [random_choice(whole.problem, 2 * seed + i) for i in range(2)]
    formulation = narrowed(whole, {n: sorted(set(choices)) for n, choices in enumerate(zip(*pair, strict=True))})
    sizes = [range(len(node.seconds)) for node in formulation.problem.nodes]
    allowed = [c for c in itertools.product(*sizes) if math.isfinite(objective(formulation.problem, c))]
    smallest = min(max(program_of(formulation, choice)[1].bytes) for choice in allowed)
    assert len(allowed) > 8
    assert 0.5 * smallest <= memory_lower_bound(formulation).bytes <= smallest * (1 + 1e-9)


def test_a_limit_below_it_is_refused_with_a_proof() -> None:
    mesh, graph = Mesh.parse("tp=2"), mlp_graph(1, 64, 64)
    least = search(graph, HARDWARE, SearchRequest(mesh, level=1)).predicted_peak_bytes
    floor = memory_lower_bound(formulate(PlanningContext(graph, mesh, HARDWARE))).bytes
    assert 0.7 * least < floor <= least
    for level in (0, 1, 2):
        with pytest.raises(InfeasibleError, match=r"^proved: no plan of mesh tp=2 fits: each holds") as caught:
            search(graph, HARDWARE, SearchRequest(mesh, level=level, memory_limit_bytes=0.99 * floor))
        assert caught.value.proven
    with pytest.raises(InfeasibleError, match="none exists is not proven") as caught:
        search(graph, HARDWARE, SearchRequest(mesh, memory_limit_bytes=(floor + least) / 2))
    assert not caught.value.proven


def test_plans_with_a_pin_are_bounded_alone() -> None:
    """More is needed of plans that keep what a pin says than of all."""
    mesh = Mesh.parse("dp=2,tp=2")
    request = SearchRequest(mesh, pins=("h.*.fc.weight=Replicate@dp,Replicate@tp",))
    graph = mlp_graph(2, 4, 256)
    free, pinned = (
        memory_lower_bound(prepare(graph, mesh, HARDWARE, option).formulation).bytes
        for option in (SearchRequest(mesh), request)
    )
    assert pinned > 1.5 * free
    with pytest.raises(InfeasibleError, match=r"^proved: .*pinned: h") as caught:
        search(graph, HARDWARE, replace(request, memory_limit_bytes=(free + pinned) / 2))
    assert caught.value.proven


def test_plans_of_a_style_are_bounded_alone() -> None:
    """Copies of weights take more than shards; other plans may fit, and it is said of which none does."""
    mesh, graph = Mesh.parse("dp=4"), mlp_graph(2, 4, 256)
    request = SearchRequest(mesh, strategy="dp")
    limit = 0.99 * memory_lower_bound(prepare(graph, mesh, HARDWARE, request).formulation).bytes
    with pytest.raises(InfeasibleError, match=r"^proved: no plan of --strategy dp on mesh dp=4 fits"):
        search(graph, HARDWARE, replace(request, memory_limit_bytes=limit))
    assert search(graph, HARDWARE, SearchRequest(mesh, memory_limit_bytes=limit)).predicted_peak_bytes <= limit


def test_a_step_of_several_micro_batches_holds_no_less() -> None:
    mesh, graph, step = Mesh.parse("tp=2"), GRAPHS["mlp"], StepRequest(micro_batches=4)
    formulation = formulate(PlanningContext(graph, mesh, HARDWARE, micro_batches=4))
    for choice in some(formulation, 3):
        solution = Solution(formulation.problem, choice, 0.0, "test")
        plan = predicted(plan_of(formulation, solution, Origin("test"), 1e18, "test"), graph)
        alone = memory_lower_bound(narrowed(formulation, {n: [s] for n, s in enumerate(choice)}))
        assert plan.step.predicted_peak_bytes >= alone.bytes
    limit = 0.99 * memory_lower_bound(formulation).bytes
    with pytest.raises(InfeasibleError, match=r"^proved: no plan of mesh tp=2 fits"):
        make_plan(graph, HARDWARE, SearchRequest(mesh, memory_limit_bytes=limit, step=step))


def test_a_program_below_the_bound_is_a_fault_that_is_told() -> None:
    assert none_within(10.0, 9.0) and none_within(10.0, 9.0, 10.0)
    assert not none_within(10.0, 10.0) and not none_within(10.0, 10.0 - 1e-10) and fits(10.0, 10.0 - 1e-12)
    assert fits(1e11, 1e11) and not fits(1e11 + 1, 1e11), "whole bytes are told apart"
    assert not none_within(-math.inf, 1.0)
    with pytest.raises(FalseProof):
        none_within(10.0, 9.0, 8.0)


def test_of_several_meshes_all_must_be_proven() -> None:
    proven, open_, wrong = InfeasibleError("a"), InfeasibleError("b", proven=False), UsageError("c")
    assert of_all_meshes([open_, proven]) is open_
    assert of_all_meshes([wrong, proven, wrong]) is proven
    assert of_all_meshes([wrong]) is wrong


def test_no_plan_on_any_mesh_of_some_devices_is_said_of_all_of_them() -> None:
    graph, request = GRAPHS["mlp"], SearchRequest(devices=4, memory_limit_bytes=1024.0)
    with pytest.raises(
        InfeasibleError, match=r"^proved: no plan of mesh .*; nor is there one on \d+ other mesh"
    ) as caught:
        make_plan(graph, HARDWARE, request)
    assert caught.value.proven


def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = tmp_path / "mlp.json"
    graph_json.save(mlp_graph(2), graph)
    words = ["plan", str(graph), "--mesh", "dp=2", "--hardware", "h100-80g-sxm", "--out", str(tmp_path / "out")]
    assert commands.main([*words, "--memory-limit", "1KiB", "--no-cache", "--json"]) == 3
    captured = capsys.readouterr()
    assert "autoshard: proved: no plan of mesh dp=2 fits: each holds at least" in captured.err
    assert json.loads(captured.out)["error"]["proven"] is True
