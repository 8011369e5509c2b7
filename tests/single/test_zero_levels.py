"""Weights in shards: gathered once a step or in every micro-batch, their gradients scattered once or in each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.layout import Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, Plan, StepPlan
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.program_check import check
from autoshard.search.fixed_step import repeated_blocks
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.simulation.steps.program_step import simulate_plan_step
from autoshard.verification.case import Case, check_files, make_case, written
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import run_lockstep
from autoshard.whole_step_search.optimizer_shards import ZeroRequest, fastest_stored, with_shards
from tests.forced import sharded_plan
from tests.single.test_recompute import SPEC
from tests.slow import quick_at

LEVELS = (1, 2, 3)


@cache
def captured() -> Graph:
    return capture(SPEC, {})


@cache
def case(micro_batches: int) -> Case:
    return make_case(SPEC, {}, captured(), steps=3, micro_batches=micro_batches)


def planned(mesh: str, axis: str, step: StepPlan) -> Plan:
    return replace(sharded_plan(captured(), Mesh.parse(mesh), axis), step=step)


@pytest.mark.parametrize(
    ("mesh", "axis", "keep", "count", "zero"),
    [
        pytest.param("dp=2", "dp", "all", 3, 2, marks=pytest.mark.slow),
        pytest.param("dp=2", "dp", "input", 2, 1, marks=pytest.mark.slow),
        pytest.param("dp=2", "dp", "all", 3, 1, marks=pytest.mark.slow),
        pytest.param("dp=4", "dp", "expensive", 2, 2, marks=pytest.mark.slow),
        ("dp=2,tp=2", "dp", "all", 2, 1),
        pytest.param("dp=2,tp=2", "dp", "input", 2, 2, marks=pytest.mark.slow),
        pytest.param("dp=2", "dp", "all", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_the_step_is_that_of_the_original(mesh: str, axis: str, keep: str, count: int, zero: int) -> None:
    """Three steps, the second clipped by the global norm; dropout is on."""
    policies = tuple(BlockPolicy(path, keep) for path in repeated_blocks(captured()) if keep != "all")
    plan = planned(mesh, axis, StepPlan(count, recompute=policies, zero=zero))
    program = lower(plan, captured())
    check(program, captured(), chosen_strategies(plan, captured()))
    assert any(bucket.once for bucket in program.weight_buckets)
    proof = check_files(case(count), program, emit(program, plan, captured()))
    assert proof.passed, proof.failure


@pytest.mark.parametrize("mesh", quick_at(["dp=2", "dp=2,tp=2"], 0))
def test_what_is_gathered_longer_takes_memory_and_saves_time(mesh: str) -> None:
    hardware = load_hardware("a100-80g-sxm")
    steps = []
    for zero in LEVELS:
        plan = planned(mesh, "dp", StepPlan(4, zero=zero))
        steps.append(simulate_plan_step(plan, lower(plan, captured()), captured(), hardware))
    seconds, peaks = [step.step_seconds for step in steps], [step.peak_bytes[0] for step in steps]
    assert seconds[0] < seconds[1] < seconds[2]
    assert peaks[0] > peaks[1] > peaks[2]


@pytest.mark.slow
def test_copies_that_make_the_same_gradient_may_stay() -> None:
    """Of a norm's weight under tensor parallelism: in shards over replicas alone, a gather less and more memory; and
    what is chosen is the faster way that fits."""
    graph, hardware = captured(), load_hardware("a100-80g-sxm")
    plan = search(graph, hardware, SearchRequest(Mesh.parse("dp=2,tp=2"), strategy="megatron"))
    plan = replace(plan, step=StepPlan(2))
    ways = {summed: with_shards(plan, graph, hardware, ZeroRequest(1, summed=summed)) for summed in (True, False)}
    axes = {
        summed: {
            p.path: {n for n, x in enumerate(p.layout.placements) if isinstance(x, Shard)} for p in split.parameters
        }
        for summed, split in ways.items()
    }
    norms = [path for path, cut in axes[False].items() if ".ln_1." in path and cut == {0, 1}]
    assert norms and all(axes[True][path] == {0} for path in norms)
    assert all(0 in cut for cut in axes[True].values())
    steps = {summed: simulate_plan_step(split, lower(split, graph), graph, hardware) for summed, split in ways.items()}
    assert steps[True].step_seconds < steps[False].step_seconds
    assert steps[True].peak_bytes[0] > steps[False].peak_bytes[0]

    def completed(plan: Plan) -> Plan:
        step = steps[next(summed for summed, split in ways.items() if split.parameters == plan.parameters)]
        return replace(
            plan,
            step=replace(plan.step, predicted_seconds=step.step_seconds, predicted_peak_bytes=step.peak_bytes[0]),
        )

    def chosen(limit: float) -> Plan:
        return fastest_stored(plan, graph, hardware, StepRequest(micro_batches=2, zero=1), completed, limit)

    assert chosen(float("inf")).parameters == ways[True].parameters
    assert chosen(steps[False].peak_bytes[0]).parameters == ways[False].parameters
    program = lower(ways[True], graph)
    proof = check_files(case(2), program, emit(program, ways[True], graph))
    assert proof.passed, proof.failure


@pytest.mark.usefixtures("whole_packages")
@pytest.mark.parametrize("zero", quick_at(LEVELS, 1))
def test_how_often_weights_are_gathered_and_gradients_scattered(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of three micro-batches, by the first of two devices."""
    count = 3
    plan = planned("dp=2", "dp", StepPlan(count, zero=zero))
    program = lower(plan, captured())
    with written(emit(program, plan, captured())) as folder:
        package = load_package(Path(folder))

        let_go: Counter[str] = Counter()
        monkeypatch.setattr(package.train, "regathering", _counting(let_go, "forward", package.train.regathering))

        def work(ranks: Any) -> Counter[str]:
            model = package.model.build_model(ranks)
            package.runtime.init_parameters(model, 0, package.initial.INITIAL)
            called: Counter[str] = Counter()
            transport = ranks["dp"].transport
            for name in ("start_all_gather", "start_reduce_scatter"):
                setattr(transport, name, _counting(called, name, getattr(transport, name)))
            ids = torch.randint(0, 40, (2, 8))
            package.train.accumulate_gradients(model, ranks, [(ids, ids)] * count)
            return called

        called = run_lockstep({"dp": 2}, work, mesh_type=package.runtime.ParallelMesh)[0]
    buckets = len(program.weight_buckets)
    assert buckets >= 4
    regathers = sum(not bucket.retained for bucket in program.weight_buckets)
    gathers = buckets if zero < 3 else called["start_all_gather"]
    assert called == {"start_all_gather": gathers, "start_reduce_scatter": buckets * (1 if zero == 1 else count)}
    assert zero < 3 or count * buckets < gathers <= count * (buckets + regathers)
    assert let_go["forward"] == (2 * count if zero == 3 else 0), "what forward gathered is not kept for backward"


@pytest.mark.usefixtures("whole_packages")
def test_weights_are_on_their_way_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and in backward the block after the one in use starts, so that alone the first of each is waited for
    as soon as it starts."""
    plan = planned("dp=2", "dp", StepPlan(1, zero=3))
    program = lower(plan, captured())
    with written(emit(program, plan, captured())) as folder:
        package = load_package(Path(folder))
        used: dict[int, list[tuple[str, int]]] = {}  # of each rank
        take = package.runtime.flat_weights._Bucket.take

        def asked(bucket: Any, weight: Any) -> Any:
            used[bucket.axis.mesh.rank].append(("asked", -1))
            return take(bucket, weight)

        monkeypatch.setattr(package.runtime.flat_weights._Bucket, "take", asked)

        def work(ranks: Any) -> list[tuple[str, int]]:
            model = package.model.build_model(ranks)
            package.runtime.init_parameters(model, 0, package.initial.INITIAL)
            events: list[tuple[str, int]] = []
            used[ranks.rank] = events
            ranks["dp"].transport.start_all_gather = _noting(events, ranks["dp"].transport.start_all_gather)
            ids = torch.randint(0, 40, (2, 8))
            package.train.accumulate_gradients(model, ranks, [(ids, ids)])
            return events

        events = run_lockstep({"dp": 2}, work, mesh_type=package.runtime.ParallelMesh)[0]
    blocks = len({bucket.block for bucket in program.weight_buckets})
    assert blocks >= 4 and sum(kind == "start" for kind, _ in events) > len(program.weight_buckets)
    late = [number for (kind, number), after in pairwise(events) if kind == "start" and after == ("waited", number)]
    assert len(late) <= 2, events


@pytest.mark.usefixtures("whole_packages")
def test_a_stage_gathers_before_its_input_comes_and_then_a_part_ahead() -> None:
    """Of two parts, here the halves of one model: all of the first at once, those of the second as the last block of
    the first comes into use."""
    plan = planned("dp=2", "dp", StepPlan(2, zero=1))
    program = lower(plan, captured())
    half = len(program.weight_buckets) // 2
    with written(emit(program, plan, captured())) as folder:
        package = load_package(Path(folder))

        def work(ranks: Any) -> tuple[list[tuple[str, int]], int]:
            model = package.model.build_model(ranks)
            package.runtime.init_parameters(model, 0, package.initial.INITIAL)
            events: list[tuple[str, int]] = []
            ranks["dp"].transport.start_all_gather = _noting(events, ranks["dp"].transport.start_all_gather)
            ids, parameters = torch.randint(0, 40, (2, 8)), package.train.parameters_of(model)
            buckets, together = package.model.WEIGHT_BUCKETS, package.runtime.gathered_together
            with together(ranks, parameters, buckets[:half]) as one, together(ranks, parameters, buckets[half:]) as two:
                package.runtime.gathered_ahead([one, two], waits=True)
                before = len(events)
                model(ids, ids)
            return events, before

        events, before = run_lockstep({"dp": 2}, work, mesh_type=package.runtime.ParallelMesh)[0]
    assert before == half and {kind for kind, _ in events[:before]} == {"start"}
    starts = [place for place, (kind, _) in enumerate(events) if kind == "start"]
    assert len(starts) == len(program.weight_buckets)
    assert starts[half:] == [*range(starts[half], starts[half] + len(starts) - half)], "one after the other, unwaited"
    assert events[starts[half] - 1] == ("waited", half - 1)


def _noting(events: list[tuple[str, int]], start: Any) -> Any:
    numbers = count()

    def started(*arguments: Any) -> Any:
        number, wait = next(numbers), start(*arguments)
        events.append(("start", number))

        def waited() -> Any:
            events.append(("waited", number))
            return wait()

        return waited

    return started


def _counting(called: Counter[str], name: str, function: Any) -> Any:
    def counted(*arguments: Any) -> Any:
        called[name] += 1
        return function(*arguments)

    return counted


FAULTS = {
    "only the last gradient counts": ("place.view(part.shape).add_(part) if weight.backwards else ", ""),
    "a micro-batch counts twice": ("        self.scattered = None\n        for weight,", "        for weight,"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "zero"), [*zip(FAULTS, (1, 2), strict=True)])
def test_a_planted_fault_is_found(fault: str, zero: int) -> None:
    plan = planned("dp=2", "dp", StepPlan(3, zero=zero))
    program = lower(plan, captured())
    files, (before, after) = dict(emit(program, plan, captured())), FAULTS[fault]
    assert files["runtime/flat_weights.py"].count(before) == 1
    files["runtime/flat_weights.py"] = files["runtime/flat_weights.py"].replace(before, after)
    assert not check_files(case(3), program, files).passed
