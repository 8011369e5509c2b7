"""Ten sizes in ten steps of one process, of models that nobody here wrote, each step compared in float64."""

from __future__ import annotations

import random
from functools import cache
from typing import Literal

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.size_histogram import SizePoint
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.graph_capture.dynamic_sizes.numbers import resized
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.program.lower import lower
from autoshard.replay.resize import reapply
from autoshard.search.search_request import SearchRequest
from autoshard.verification.case import check_files, make_case
from autoshard.workflow import make_plan
from tests.transformer_models import SIZES, spec

STEPS = 10
CPU = load_hardware("cpu-local")
REQUESTS = {
    "plain": SearchRequest(Mesh.parse("dp=2,tp=2")),
    "ZeRO 3": SearchRequest(Mesh.parse("dp=2,tp=2"), strategy="fsdp-tp"),
    "recompute": SearchRequest(Mesh.parse("dp=2,tp=2"), step=StepRequest(recompute="full")),
    "stages": SearchRequest(Mesh.parse("dp=2"), step=StepRequest(stages=2, micro_batches=2)),
}


@cache
def graph_of(name: str) -> Graph:
    return capture(spec(name), {}, dynamic=(SIZES[name],))


def ten(graph: Graph) -> list[dict[str, int]]:
    """All different, with the least and the largest of each size among them."""
    source = random.Random(3)
    samples = [{dim.name: dim.least for dim in graph.dynamic}, {dim.name: dim.most for dim in graph.dynamic}]
    while len(samples) < STEPS:
        units = {dim.name: source.randint(0, (dim.most - dim.least) // dim.divisor) for dim in graph.dynamic}
        sizes = {dim.name: dim.least + units[dim.name] * dim.divisor for dim in graph.dynamic}
        samples += [sizes] * (sizes not in samples)
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("name", SIZES)
def test_ten_sizes_in_ten_steps(name: str, kind: str) -> None:
    graph, wanted = graph_of(name), REQUESTS[kind]
    plan = make_plan(graph, CPU, wanted).plan
    program, count = lower(plan, graph), plan.step.micro_batches
    case = make_case(spec(name), {}, graph, micro_batches=count, sizes=ten(graph))
    backend: Literal["gloo", "lockstep"] = "gloo" if plan.step.parts else "lockstep"
    proof = check_files(case, program, emit(program, plan, graph), backend)
    assert proof.passed and proof.steps == STEPS, proof.failure


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_no_plan_of_one_size_is_expected_to_take_less(name: str) -> None:
    graph, hardware, mesh = graph_of(name), load_hardware("a100-80g-sxm"), Mesh.parse("dp=2,tp=4")
    sizes = ten(graph)[:4]
    points = tuple(
        SizePoint(tuple(sample.items()), weight) for sample, weight in zip(sizes, (0.4, 0.1, 0.3, 0.2), strict=True)
    )
    plan = make_plan(graph, hardware, SearchRequest(mesh, sizes=points)).plan
    for sample in sizes:
        at = resized(graph, sample)
        other = reapply(make_plan(at, hardware, SearchRequest(mesh)).plan, at, graph, hardware)
        steps = [reapply(other, graph, resized(graph, one), hardware).step_seconds for one in sizes]
        expected = sum(point.weight * step for point, step in zip(points, steps, strict=True))
        assert plan.search.expected_seconds <= expected * (1 + 1e-9)
    assert 0 < plan.certificate.level_bound <= plan.search.expected_seconds
