"""The verification matrix: three models on six meshes, each with its best plan, Megatron's and three random ones.

Every plan runs in lock-step; on every mesh one runs on gloo processes too. The best and Megatron's plans are those of
the full size on A100s, carried over. Together, and with the covering plans, they execute every kind of strategy and of
redistribution that the models offer.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.emit import emit
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.replay.resize import reapply
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification import Case, Proof, check_files, make_case
from tests.coverage import Coverage, covering_plans, forced_plan, redistribution_coverage, strategy_coverage
from tests.slow import quick, slow

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = ("mlp", "lenet", "gpt2")
MESHES = ("dp=1", "dp=2", "dp=4", "dp=2,tp=2", "dp=2,tp=4", "pp=2,dp=2,tp=2")
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 16, "features": 32, "hidden": 64, "outputs": 8},
    "lenet": {"batch": 8},
    "gpt2": {"n_layer": 2, "sequence": 8, "n_embd": 96, "vocabulary": 97},
}
# For random and covering plans: sizes that axes of 2 and of 4 cut unevenly, also in blocks and units.
UNEVEN: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 16, "features": 12, "hidden": 22, "outputs": 7},
    "lenet": {"batch": 8},
    "gpt2": {"n_layer": 1, "sequence": 8, "n_embd": 48, "n_head": 6, "vocabulary": 97},
}
RANDOM_PLANS = 3
QUICK = (
    ("mlp", "dp=2,tp=4"), ("lenet", "dp=4"), ("gpt2", "dp=2,tp=2"), ("gpt2", "pp=2,dp=2,tp=2"),
)  # fmt: skip


def spec(model: str) -> str:
    return f"{EXAMPLES / model}.py:build"


@cache
def hardware() -> Hardware:
    return load_hardware("a100-80g-sxm")


@cache
def full_graph(model: str) -> Graph:
    return capture(spec(model), {})


@cache
def case(model: str, uneven: bool = False, steps: int = 3) -> Case:
    sizes = (UNEVEN if uneven else SIZES)[model]
    return make_case(spec(model), sizes, capture(spec(model), sizes), steps=steps)


@cache
def named_plan(model: str, mesh: str, name: str) -> Plan:
    """The best plan or Megatron's of the full size, at the small sizes."""
    full = full_graph(model)
    return reapply(
        search(full, hardware(), SearchRequest(Mesh.parse(mesh), strategy=name)), full, case(model).graph, hardware()
    )


def check(plan: Plan, where: Case, backend: Any = "lockstep") -> tuple[Program, Proof]:
    program = lower(plan, where.graph)
    return program, check_files(where, program, emit(program, plan, where.graph), backend)


@pytest.mark.parametrize(("model", "mesh"), quick(product(MODELS, MESHES), QUICK[:1]))
@pytest.mark.parametrize("name", ["best", slow("megatron")])
def test_named_plans(model: str, mesh: str, name: str) -> None:
    _, proof = check(named_plan(model, mesh, name), case(model))
    assert proof.passed, proof.failure
    assert (proof.clipped_steps, proof.steps) == (2, 3)
    assert proof.ranks == Mesh.parse(mesh).size


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), quick(product(MODELS, MESHES), QUICK[2:3]))
def test_random_plans(model: str, mesh: str) -> None:
    where = case(model, uneven=True)
    for seed in range(RANDOM_PLANS):
        _, proof = check(random_plan(PlanningContext(where.graph, Mesh.parse(mesh), hardware()), seed), where)
        assert proof.passed, f"seed {seed}: {proof.failure}"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_without_all_to_all(model: str) -> None:
    where = case(model, uneven=True)
    plan = random_plan(PlanningContext(where.graph, Mesh.parse("dp=2,tp=2"), hardware(), all_to_all=False), 1)
    _, proof = check(plan, where)
    assert proof.passed, proof.failure


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_on_gloo_processes(mesh: str) -> None:
    _, proof = check(named_plan("gpt2", mesh, "megatron"), case("gpt2"), "gloo")
    assert proof.passed, proof.failure
    assert proof.backend == "gloo" and proof.ranks == Mesh.parse(mesh).size


def test_the_megatron_plan_is_one() -> None:
    """Blocked QKV, heads split, row-parallel projections with a bias, a vocabulary-parallel head."""
    plan, graph = named_plan("gpt2", "dp=2,tp=2", "megatron"), case("gpt2").graph
    tensor = {op.op: op.strategy.split()[-1] for op in plan.ops}
    by_module = {(op.module, op.target): tensor[op.name] for op in graph.ops}
    assert by_module["transformer.h.0.attn.c_attn", "autoshard.linear_in_out"].startswith("n/3")
    assert by_module["transformer.h.0.attn", "aten.scaled_dot_product_attention"] == "h"
    for module in ("transformer.h.0.attn.c_proj", "transformer.h.1.mlp.c_proj"):
        assert by_module[module, "autoshard.linear_in_out"] == "m"
    assert by_module["lm_head", "aten.linear"] == "n"
    assert any(op.variant == "parallel_cross_entropy" for op in plan.ops)
    layouts = {t.path: t.layout for t in plan.parameters}
    assert layouts["transformer.h.0.attn.c_attn.weight"].placements[1] == Shard(1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_is_executed(model: str) -> None:
    where, mesh = case(model, uneven=True, steps=1), Mesh.parse("dp=2,tp=2")
    formulation = formulate(PlanningContext(where.graph, mesh, hardware()))
    plans, programs = [], []

    def run(plan: Plan) -> None:
        program, proof = check(plan, where)
        assert proof.passed, f"plan {len(plans)} ({plan.ops[0].decided_by}): {proof.failure}"
        plans.append(plan)
        programs.append(program)

    def coverage() -> Coverage:
        return strategy_coverage(formulation, plans) | redistribution_coverage(formulation, programs)

    for plan in covering_plans(where.graph, mesh, hardware(), 0):
        run(plan)
    for kind in coverage().missing:
        forced = forced_plan(formulation, kind)
        assert forced is not None, kind
        run(forced)
    covered = coverage()
    print(f"{model} on {mesh}: {len(plans)} plans, {covered}")
    assert len(covered.offered) > {"mlp": 30, "lenet": 60, "gpt2": 120}[model]
    assert not covered.missing


@pytest.mark.parametrize("optimizer", [slow("adamw"), "sgd"])
@pytest.mark.parametrize("model", quick(MODELS, ("gpt2",)))
def test_mixed_precision_and_sgd(model: str, optimizer: str) -> None:
    graph = capture(spec(model), SIZES[model], "bf16-mixed", optimizer)
    where = make_case(spec(model), SIZES[model], graph)
    _, proof = check(search(graph, hardware(), SearchRequest(Mesh.parse("dp=2,tp=2"), strategy="megatron")), where)
    assert proof.passed, proof.failure


def test_inference() -> None:
    graph = capture(spec("lenet"), SIZES["lenet"], training=False)
    where = make_case(spec("lenet"), SIZES["lenet"], graph)
    for seed in range(RANDOM_PLANS):
        _, proof = check(random_plan(PlanningContext(graph, Mesh.parse("dp=2,tp=2"), hardware()), seed), where)
        assert proof.passed, proof.failure
        assert proof.clipped_steps == 0
        assert {kind.kind: kind.count > 0 for kind in proof.kinds}["gradient"] is False
