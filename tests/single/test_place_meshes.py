"""Places with meshes of their own: what travels, packages against the original, and what can't be."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StagePin, StepRequest
from autoshard.emit import emit
from autoshard.emit.runtime.between_meshes import MeshLayout, pieces, put, taken
from autoshard.errors import UsageError
from autoshard.graph_capture.capture import capture
from autoshard.html_report.picture.plan_picture import plan_svg
from autoshard.html_report.picture.stage_row import handed_bytes
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.plan_json import dumps, loads
from autoshard.program.lower import lower
from autoshard.program.stage_programs import stage_programs
from autoshard.redistribute.two_meshes import On, sent_and_received, transfers
from autoshard.replay.command_line import command
from autoshard.search.search_request import SearchRequest
from autoshard.simulation.steps.placed_step import PlacedCosts
from autoshard.simulation.steps.program_step import simulate_plan_step
from autoshard.units import format_bytes
from autoshard.verification.case import check_files, make_case
from autoshard.verification.comparison.compare import local_part
from autoshard.workflow import make_plan
from benchmarks.fuzz import RIGHT, run_places
from tests.slow import slow
from tests.tiny.test_two_meshes import drawn

SPEC = "tests/placed_towers.py:build"
PLACES = (StagePin("vision", 0), StagePin("language", 1))
CPU = load_hardware("cpu-local")


def as_text(on: On) -> MeshLayout:
    return MeshLayout(on[0].axes, str(on[1]))


def test_the_package_sends_what_the_planner_counts() -> None:
    rng = random.Random(1)
    for _ in range(150):
        shape, first, second = drawn(rng)
        if as_text(first) == as_text(second):
            continue
        every = pieces(shape, as_text(first), as_text(second))
        counted = {(piece.sender, piece.receiver): torch.Size(piece.lengths).numel() for piece in every}
        assert counted == transfers(shape, first, second)
        whole = torch.randn(shape)
        results = []
        for rank in range(second[0].size):
            parts = [(piece, taken(local_part(whole, first[1], first[0], piece.sender), piece)) for piece in every
                     if piece.receiver == rank]  # fmt: skip
            shape = tuple(local_part(whole, second[1], second[0], rank).shape)
            results.append(put(shape, parts, whole.device, whole.dtype))
        summed = [axis for axis, p in enumerate(second[1].placements) if str(p) == "P"]
        for rank, result in enumerate(results):
            at = second[0].coordinates(rank)
            alike = [
                other
                for other in range(second[0].size)
                if all(a == b for axis, (a, b) in enumerate(zip(at, second[0].coordinates(other), strict=True))
                       if axis not in summed)
            ]  # fmt: skip
            value = torch.stack([results[other] for other in alike]).sum(0) if summed else result
            assert torch.equal(value, local_part(whole, second[1], second[0], rank))


@cache
def captured() -> Graph:
    return capture(SPEC, {})


def planned(mesh: str, *meshes: str, **options: object) -> Plan:
    strategy = str(options.pop("strategy", "best"))
    step = StepRequest(places=PLACES, place_mesh=meshes, **options)  # type: ignore[arg-type]
    request = SearchRequest(Mesh.parse(mesh), step=step, strategy=strategy)
    return make_plan(captured(), CPU, request).plan


@pytest.mark.parametrize(
    ("mesh", "meshes", "count", "schedule"),
    [
        slow("dp=2", ("1:dp=2,tp=2",), 1, "gpipe"),
        ("dp=3", ("0:tp=2",), 2, "1f1b"),
        slow("dp=1", ("1:tp=3",), 2, "gpipe"),
    ],
)
def test_random_plans_are_those_of_the_original(mesh: str, meshes: tuple[str, ...], count: int, schedule: str) -> None:
    graph = captured()
    plan = planned(mesh, *meshes, micro_batches=count, schedule=schedule, strategy=f"random:{count}")
    program = lower(plan, graph)
    case = make_case(SPEC, {}, graph, steps=2, micro_batches=count)
    proof = check_files(case, program, emit(program, plan, graph), own_precision=mesh == "dp=2")
    assert proof.passed, proof.failure
    assert proof.ranks == plan.devices == sum(place_mesh.size for place_mesh in plan.meshes)


@pytest.mark.parametrize("zero", [slow(1), slow(2), 3])
def test_weights_are_in_shards_on_the_axes_of_each_place(zero: int) -> None:
    """Over the devices that would hold them alike: two of one place, six of the other."""
    graph = captured()
    plan = planned("dp=2", "1:dp=3,tp=2", micro_batches=2, zero=zero, strategy="dp")
    assert plan.step.zero == zero
    stored = [plan.parameters, plan.place_plans[0].parameters]
    assert [{str(weight.layout) for weight in weights} for weights in stored] == [{"S0"}, {"S0 S0"}]
    program = lower(plan, graph)
    proof = check_files(make_case(SPEC, {}, graph, steps=3, micro_batches=2), program, emit(program, plan, graph))
    assert proof.passed, proof.failure


@pytest.mark.slow
def test_a_plan_is_read_again_and_says_its_meshes() -> None:
    plan = planned("dp=2", "1:dp=2,tp=2")
    assert loads(dumps(plan)) == plan
    assert plan.where == "place 0: dp=2, place 1: dp=2,tp=2"
    assert "--place-mesh 1:dp=2,tp=2" in command(plan, captured())
    assert planned("dp=2", "1:dp=2").place_plans == ()  # as --mesh says


def test_messages_are_those_of_the_busiest_device() -> None:
    """What four devices read together is sent by two."""
    for seed in range(4):
        plan = planned("dp=2", "1:dp=2,tp=2", strategy=f"random:{seed}")
        parts = stage_programs(lower(plan, captured()))
        costs = simulate_plan_step(plan, lower(plan, captured()), captured(), CPU).costs
        assert isinstance(costs, PlacedCosts)
        (message,) = costs.messages
        (name,) = parts[message.maker].outputs
        maker, reader = (parts[index].value(name) for index in (message.maker, message.reader))
        first, second = (parts[message.maker].mesh, maker.layout), (parts[message.reader].mesh, reader.layout)
        busiest = max(map(max, sent_and_received(maker.shape, first, second)))
        assert message.bytes == 4 * busiest


def test_a_weight_of_two_meshes_is_refused() -> None:
    step = StepRequest(places=PLACES, place_mesh=("1:tp=2",))
    graph = capture(SPEC, {"tie": True})
    with pytest.raises(UsageError, match="read on places of different meshes: place 0 on dp=1 and place 1 on tp=2"):
        make_plan(graph, CPU, SearchRequest(Mesh.parse("dp=1"), step=step))


def test_more_devices_than_there_are() -> None:
    with pytest.raises(UsageError, match="devices"):
        planned("dp=2", "1:dp=4096,tp=4096")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [62, 70])
def test_a_redistribution_that_several_parts_read(seed: int) -> None:
    """Of a buffer that is written back, which another place reads; of a column-parallel linear in a later part."""
    row = run_places(seed)
    assert row.end == RIGHT, row.reason


def test_the_picture_has_places_side_by_side_with_what_they_give_each_other() -> None:
    """Bytes are those of the messages where each place is one device; ranks and meshes are the place's own."""
    plan = planned("dp=1", "1:dp=1")
    costs = simulate_plan_step(plan, lower(plan, captured()), captured(), CPU).costs
    assert isinstance(costs, PlacedCosts)
    sent: dict[tuple[int, int], float] = {}
    for message in costs.messages:
        pair = plan.step.part_stages[message.maker], plan.step.part_stages[message.reader]
        sent[pair] = sent.get(pair, 0.0) + message.bytes
    assert sent and handed_bytes(plan, captured()) == pytest.approx(sent)
    plan = planned("dp=2", "1:dp=2,tp=2")
    drawn = plan_svg(plan, captured(), CPU)
    assert ">place 1</text>" in drawn and ">ranks 2 to 5</text>" in drawn and ">dp=2,tp=2</text>" in drawn
    for (maker, reader), size in handed_bytes(plan, captured()).items():
        assert f">{maker} to {reader}: {format_bytes(size)}</text>" in drawn
        assert f"place {maker} gives place {reader} {format_bytes(size)}" in drawn
