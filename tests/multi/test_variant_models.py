"""Whole models whose attention or norms are all made to use a variant: random plans of what is left, run.

Every family once on gloo processes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Op
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.rules.algebra.strategy import Strategy
from autoshard.search.fixed_styles import random_plan
from autoshard.verification import Case, check_files, make_case
from tests.models import NAMES
from tests.slow import slow

ATTENTION, LAYER_NORM, BATCH_NORM = "aten.scaled_dot_product_attention", "aten.layer_norm", "aten.batch_norm"
FORCED = [
    slow("llama", ATTENTION, "parallel_attention", "tp=4", "lockstep"),
    slow("llama", ATTENTION, "parallel_attention", "dp=2,tp=2", "lockstep"),
    slow("llama", ATTENTION, "ring_attention", "tp=4", "lockstep"),
    slow("llama", ATTENTION, "ring_attention", "dp=2,tp=2", "lockstep"),
    slow("llama", ATTENTION, "ring_attention", "dp=2,tp=2", "gloo"),
    slow("llama", ATTENTION, "balanced_ring_attention", "tp=4", "lockstep"),
    slow("llama", ATTENTION, "balanced_ring_attention", "tp=2", "gloo"),
    slow("llama", ATTENTION, "balanced_ring_attention", "tp=4", "gloo"),
    slow("llama", ATTENTION, "balanced_ring_attention", "dp=2,tp=2", "gloo"),
    slow("bert", LAYER_NORM, "parallel_layer_norm", "tp=2", "lockstep"),
    slow("bert", LAYER_NORM, "parallel_layer_norm", "dp=2,tp=2", "gloo"),
    ("resnet", BATCH_NORM, "synchronised_batch_norm", "tp=4", "lockstep"),
    slow("resnet", BATCH_NORM, "synchronised_batch_norm", "dp=2,tp=2", "gloo"),
]


@cache
def case(name: str) -> Case:
    return make_case(NAMES[name], {}, capture(NAMES[name], {}), steps=2)


@pytest.mark.parametrize(("name", "target", "variant", "mesh", "backend"), FORCED)
def test_a_model_that_must_use_the_variant(name: str, target: str, variant: str, mesh: str, backend: Any) -> None:
    where = case(name)

    def allowed(op: Op, strategy: Strategy) -> bool:
        return op.target != target or strategy.variant == variant

    plan = random_plan(
        PlanningContext(where.graph, Mesh.parse(mesh), load_hardware("a100-80g-sxm")), 0, allowed=allowed
    )
    variants = [op.variant for op in plan.ops if where.graph.by_op[op.op].target == target]
    assert variants and set(variants) == {variant}
    program = lower(plan, where.graph)
    files = emit(program, plan, where.graph)
    assert f"{variant}(" in files["model_parallel.py"]
    proof = check_files(where, program, files, backend)
    assert proof.passed, proof.failure
