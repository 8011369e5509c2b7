"""Predicted memory of a step against what torch measures: emitted packages on gloo processes of this CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph, Op
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.rules.algebra.strategy import Strategy
from autoshard.search.fixed_step import predicted, with_step
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.simulation.memory_curve import plan_memory
from autoshard.verification.ranks.rank_processes import run_processes
from autoshard.whole_step_search.optimizer_shards import ZeroRequest, with_shards
from tests.hangs import HANGS
from tests.memory_worker import PHASES
from tests.models import NAMES

ROOT = Path(__file__).parents[2]
GPT2 = {"batch": 4, "sequence": 32, "n_layer": 2, "n_embd": 96, "vocabulary": 98, "dropout": 0.0}
HARDWARE = load_hardware("a100-80g-sxm")
ATTENTION, CONVOLUTION, CROSS_ENTROPY = "aten.scaled_dot_product_attention", "aten.conv2d", "aten.cross_entropy_loss"
Make = Callable[[Mesh], tuple[Graph, Plan]]


def gpt2(**sizes: int) -> Graph:
    return capture(f"{ROOT}/examples/gpt2.py:build", GPT2 | sizes)


def megatron(**sizes: int) -> Make:
    return lambda mesh: (graph := gpt2(**sizes), search(graph, HARDWARE, SearchRequest(mesh, strategy="megatron")))


def smallest(mesh: Mesh) -> tuple[Graph, Plan]:
    """Weights, gradients and optimizer state are stored in shards and gathered for use."""
    graph = gpt2()
    return graph, search(graph, HARDWARE, SearchRequest(mesh, level=1))


def recomputed(mesh: Mesh) -> tuple[Graph, Plan]:
    """Whole weights, gathered once a step, stay while blocks are recomputed."""
    graph, step = gpt2(), StepRequest(recompute="full")
    plan = search(graph, HARDWARE, SearchRequest(mesh, strategy="megatron", step=step))
    plan = with_shards(with_step(plan, graph, step), graph, HARDWARE, ZeroRequest(1))
    return graph, predicted(plan, graph)


def forced(build: Callable[[], Graph], target: str, variant: str, seed: int = 0) -> Make:
    """A random plan whose operators of one kind all use a variant; it moves tensors in all ways."""

    def allowed(op: Op, strategy: Strategy) -> bool:
        return op.target != target or strategy.variant == variant

    return lambda mesh: (graph := build(), random_plan(PlanningContext(graph, mesh, HARDWARE), seed, allowed=allowed))


def images() -> Graph:
    return capture(f"{ROOT}/tests/single/test_memory_measured.py:resnet", {})


PLANS: dict[str, Make] = {
    "smallest": smallest,
    "gathered attention": forced(gpt2, ATTENTION, "parallel_attention"),
    "balanced attention": forced(gpt2, ATTENTION, "balanced_ring_attention"),
    "images": forced(images, CONVOLUTION, "halo_convolution"),
}
MORE: dict[str, Make] = {
    "megatron": megatron(),
    "megatron, uneven": megatron(vocabulary=97, n_head=6),
    "random": forced(gpt2, "", "", 2),  # of seed 0 values have smaller heads than queries: a CPU keeps those scores
    "vocabulary": forced(gpt2, CROSS_ENTROPY, "parallel_cross_entropy", 1),
    "normalised images": forced(images, "aten.batch_norm", "synchronised_batch_norm"),
    "experts": lambda mesh: (graph := capture(NAMES["mixtral"], {}), search(graph, HARDWARE, SearchRequest(mesh))),
}
GRID: dict[str, Make] = {"megatron": megatron(), "random": forced(gpt2, "", "", 1), "recomputed": recomputed}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mesh", "plans", "tolerance"),
    [
        pytest.param("tp=2", PLANS, 0.02, id="two", marks=pytest.mark.slow),
        pytest.param("tp=2", MORE, 0.03, id="two, more", marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", GRID, 0.03, id="four", marks=pytest.mark.slow),
    ],
)
def test_peak_of_a_step(mesh: str, plans: dict[str, Make], tolerance: float, tmp_path: Path) -> None:
    """What is left: on a CPU, attention of some shapes keeps its scores."""
    said = {name: written(make, Mesh.parse(mesh), tmp_path / name) for name, make in plans.items()}
    run_processes("tests.memory_worker", [mesh, str(tmp_path)], Mesh.parse(mesh).size, HANGS)
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert len(ranks) == Mesh.parse(mesh).size
    assert said == pytest.approx(peaks(ranks), rel=tolerance)


def written(make: Make, mesh: Mesh, folder: Path) -> float:
    """Emits the package into the folder; gives the peak that is predicted."""
    graph, plan = make(mesh)
    program = lower(plan, graph)
    for name, text in emit(program, plan, graph).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return plan.step.predicted_peak_bytes or max(plan_memory(program, graph).bytes)


def peaks(ranks: Sequence[dict[str, dict[str, list[int]]]]) -> dict[str, float]:
    """Of every package, on the rank with most."""
    return {
        name: max(float(rank[name]["fixed"] + max(rank[name][phase][0] for phase in PHASES)) for rank in ranks)  # type: ignore[operator]
        for name in ranks[0]
    }
