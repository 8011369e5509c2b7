"""Models of several kinds over random stages, with what each block keeps drawn too: gloo against the original."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import RECOMPUTE, StepRequest
from autoshard.emit import emit
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, StagePart
from autoshard.program.lower import lower
from autoshard.search.fixed_step import with_step
from autoshard.search.fixed_styles import random_plan
from autoshard.verification.case import check_files, make_case

MODELS = Path(__file__).parents[1] / "models"
COUNT = 4
CASES = [
    ("decoders.py:llama", "tp=2", {"stages": 2}), ("decoders.py:llama", "dp=1", {"stages": 2, "virtual_stages": 2}),
    ("decoders.py:mixtral", "dp=2", {"stages": 2}), ("pairs.py:t5", "tp=2", {"stages": 2}),
    ("vision.py:resnet", "dp=2", {"stages": 2}), ("vision.py:vit", "dp=2", {"stages": 2, "schedule": "gpipe"}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("name", "mesh", "step"), CASES, ids=lambda value: str(value))
def test_random_stages_and_policies(name: str, mesh: str, step: dict[str, object], seed: int) -> None:
    spec, drawn = f"{MODELS / name.split(':')[0]}:{name.split(':')[1]}", random.Random(f"{name}{seed}")
    sizes = {"layers": 4} if name.startswith(("decoders", "pairs")) else {}
    graph = capture(spec, sizes)
    plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), load_hardware("cpu-local")), seed)
    request = StepRequest(micro_batches=COUNT, recompute="full", **step)  # type: ignore[arg-type]
    plan = with_step(plan, graph, request)
    starts = [0, *sorted(drawn.sample(range(1, len(graph.ops)), len(plan.step.parts) - 1))]
    stages = plan.step.stages
    parts = tuple(StagePart(i % stages, i // stages, graph.ops[s].name) for i, s in enumerate(starts))
    policies = tuple(BlockPolicy(policy.module, drawn.choice([*RECOMPUTE.values()])) for policy in plan.step.recompute)
    plan = replace(plan, step=replace(plan.step, parts=parts, recompute=policies))
    program = lower(plan, graph)
    case = make_case(spec, sizes, graph, steps=2, micro_batches=COUNT)
    proof = check_files(case, program, emit(program, plan, graph), "gloo", 240.0)
    assert proof.passed, proof.failure
    assert proof.ranks == plan.devices
