"""Parts of a model on places: their order, their messages, and packages against the original."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.api.settings import search_request, step_request
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.model_request import with_requests
from autoshard.constraints.step_request import StagePin, StepRequest
from autoshard.emit import emit
from autoshard.emit.runtime.places import Handed, PlaceMessage, PlaceSlot, Routes, read_slots
from autoshard.errors import UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph, Op, Parameter
from autoshard.ir.graph import Tensor as Value
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, StepPlan
from autoshard.program.lower import lower
from autoshard.program.schedules.pipeline_schedule import chain_order, order_of
from autoshard.program.schedules.place_order import placed_order, ways_to_loss
from autoshard.program.schedules.placed_parts import op_places, parts_on, placed_parts
from autoshard.program.stage_programs import stage_programs
from autoshard.program.step_check import check_step
from autoshard.replay.command_line import command
from autoshard.replay.simulated_plan import simulate_plan
from autoshard.search.fixed_step import predicted, with_step
from autoshard.search.fixed_styles import random_plan
from autoshard.simulation.steps.program_step import simulate_plan_step
from autoshard.text import plan_diff
from autoshard.text.plan_summary import summary
from autoshard.verification.case import check_files, make_case
from autoshard.verification.comparison.proof import Proof
from autoshard.workflow import make_plan
from tests.placements import random_parts
from tests.slow import quick_at, slow

SPEC = "tests/random_steps.py:build"


# --- order ---


@pytest.mark.parametrize(("places", "count"), [(2, 4), (3, 5), (4, 9)])
def test_on_a_chain_the_orders_are_those_of_stages(places: int, count: int) -> None:
    sources = [[(part - 1, 0)] if part else [] for part in range(places)]
    for schedule in ("gpipe", "1f1b"):
        order = placed_order(schedule, range(places), sources, places - 1, count)
        for place in range(places):
            slots = [(slot.kind, slot.micro_batch) for slot in order if slot.part == place]
            assert slots == [(slot.kind, slot.micro_batch) for slot in order_of(schedule, place, places, count, 1)]


def test_ten_thousand_random_placements_end() -> None:
    """Where every transfer waits for both ends and goes in the order of its pair, as NCCL's do."""
    rng = random.Random(0)
    for _ in range(10_000):
        ended, slots = run(*drawn(rng))
        assert ended, slots


def test_an_order_of_its_own_on_one_place_is_seen_to_hang() -> None:
    """The checker can fail: two places whose receives come in the wrong order."""
    sources: list[list[tuple[int, int]]] = [[], [(0, 0)], [(1, 0)], [(2, 0)]]
    order = [PlaceSlot(*slot) for slot in placed_order("gpipe", (0, 1, 0, 1), sources, 3, 1)]
    assert run(order, (0, 1, 0, 1), sources)[0]
    turned = [order[2], *order[:2], *order[3:]]  # a place begins with its second part
    assert not run(turned, (0, 1, 0, 1), sources)[0]


def drawn(rng: random.Random) -> tuple[list[PlaceSlot], tuple[int, ...], list[list[tuple[int, int]]]]:
    """Slots, places of parts and sources of a random DAG."""
    parts, places = rng.randint(2, 7), rng.randint(2, 4)
    sources: list[list[tuple[int, int]]] = [
        [(maker, 0) for maker in range(part) if rng.random() < 0.5] for part in range(parts)
    ]
    for part in range(parts - 1):  # each is read by some later one
        if all((part, 0) not in reads for reads in sources):
            sources[rng.randint(part + 1, parts - 1)].append((part, 0))
    assigned = [rng.randrange(places) for _ in range(parts)]
    known = sorted(set(assigned))
    on = tuple(known.index(place) for place in assigned)
    schedule, count = rng.choice(("gpipe", "1f1b")), rng.randint(1, 4)
    text = " ".join(map(str, placed_order(schedule, on, sources, parts - 1, count)))
    return read_slots(text), on, sources


def run(
    slots: list[PlaceSlot], on: tuple[int, ...], sources: list[list[tuple[int, int]]], ahead: bool = False
) -> tuple[bool, object]:
    """Do all places end? Each posts its receives of a pair up to the one it waits for, and waits for sends at the end.
    A transfer is done when both ends have posted it and those before it of its pair are done. `ahead`: see `Places`."""
    value = Handed((1,), torch.float32, "R", True)
    routes = Routes(slots, on, [[value] * len(reads) for reads in sources], sources)
    places = sorted(set(on))
    between = routes.between
    numbers = {message: number for a in places for b in between[a] for number, message in enumerate(between[a][b], 1)}
    posted = {(place, peer): 0 for place in places for peer in between[place]}
    waits: dict[int, PlaceMessage | None] = dict.fromkeys(places)

    def done(place: int, message: PlaceMessage) -> bool:
        peer = _peer(message, place, on)
        return numbers[message] <= min(posted[place, peer], posted[peer, place])

    def work(place: int) -> Iterator[PlaceMessage]:
        for slot in slots:
            if on[slot.part] == place:
                for peer, every in between[place].items() if ahead else ():
                    early = [sent for sent in every[posted[place, peer] :] if routes.sent_at[sent] < routes.turn[slot]]
                    if any(_sender(sent, on) == place for sent in early):
                        return
                    posted[place, peer] += len(early)
                for message in (*routes.needs[slot], *routes.sends[slot]):
                    peer, number = _peer(message, place, on), numbers[message]
                    for earlier in between[place][peer][posted[place, peer] : number]:
                        if earlier is not message and _sender(earlier, on) == place:
                            return  # it would have to send what it has not made
                    posted[place, peer] = max(posted[place, peer], number)
                    if message in routes.needs[slot]:
                        yield message

    running = {place: work(place) for place in places}
    while running:
        free = [place for place in running if (waited := waits[place]) is None or done(place, waited)]
        if not free:
            return False, slots
        for place in free:
            waits[place] = next(running[place], None)
            if waits[place] is None:
                del running[place]
    return all(posted[a, b] == posted[b, a] == len(between[a][b]) for a, b in posted), slots


def _sender(message: PlaceMessage, on: tuple[int, ...]) -> int:
    return on[message.part] if message.kind == "F" else message.place


def _peer(message: PlaceMessage, place: int, on: tuple[int, ...]) -> int:
    return message.place if on[message.part] == place else on[message.part]


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    quick_at([("gpipe", 1), ("1f1b", 1), *(("interleaved", n) for n in range(1, 5))], 0, 1, 2, 3),
)
def test_stages_end_whatever_skips_them(schedule: str, virtual: int) -> None:
    """Each keeps to its schedule's order; values go to later stages than the next one, too."""
    rng = random.Random(virtual)
    for stages in range(2, 9):
        for count in range(1, 17):
            if schedule == "interleaved" and count % stages:
                continue
            order, parts = chain_order(schedule, stages, count, virtual), range(stages * virtual)
            on = tuple(part % stages for part in parts)
            for stage in range(stages):
                of_stage = [(kind, m, part // stages) for kind, m, part in order if on[part] == stage]
                assert of_stage == list(order_of(schedule, stage, stages, count, virtual))
            sources = [[(maker, 0) for maker in range(part) if maker == part - 1 or rng.random() < 0.1]
                       for part in parts]  # fmt: skip
            slots = read_slots(" ".join(map(str, order)))
            assert run(slots, on, sources, schedule == "interleaved")[0], (stages, count)


def test_a_place_begins_as_many_micro_batches_as_places_are_between_it_and_the_loss() -> None:
    # 0 and 1 are towers, 2 joins them, 3 makes the loss of what 2 and 0 give
    assert ways_to_loss((0, 1, 2, 3), [[], [], [(0, 0), (1, 0)], [(2, 0), (0, 0)]]) == [3, 3, 2, 1]


# --- packages ---


@cache
def captured(seed: int) -> Graph:
    return capture(SPEC, {"seed": seed})


def placed(seed: int, graph: Graph, schedule: str = "1f1b", mesh: str = "dp=1", count: int = 2) -> Plan:
    plan = random_plan(PlanningContext(graph, Mesh.parse(mesh), load_hardware("cpu-local")), seed)
    plan = replace(plan, step=StepPlan(count, schedule, 1, random_parts(graph, seed)))
    check_step(plan.step, graph)
    return predicted(plan, graph)


def proved(
    seed: int, schedule: str = "1f1b", mesh: str = "dp=1", count: int = 2, fault: tuple[str, str] = ("", "")
) -> Proof:
    graph = captured(seed)
    plan = placed(seed, graph, schedule, mesh, count)
    files = dict(emit(lower(plan, graph), plan, graph))
    if fault[0]:
        assert fault[0] in files["runtime/places.py"]
        files["runtime/places.py"] = files["runtime/places.py"].replace(*fault)
    case = make_case(SPEC, {"seed": seed}, graph, steps=2, micro_batches=count)
    return check_files(case, lower(plan, graph), files, "lockstep", 60.0)


@pytest.mark.parametrize(
    ("seed", "schedule", "mesh", "count"),
    [slow(0, "gpipe", "dp=1", 1), slow(2, "1f1b", "tp=2", 3), (7, "1f1b", "dp=2", 2), slow(8, "gpipe", "tp=2", 2)],
)
def test_random_places_compute_the_models_own_numbers(seed: int, schedule: str, mesh: str, count: int) -> None:
    proof = proved(seed, schedule, mesh, count)
    assert proof.passed, proof.failure


@pytest.mark.parametrize(
    "fault",
    [
        slow(("known + leaf_grad", "leaf_grad")),  # of a value that two parts read one gradient is lost
        ("output[0] / len(self.micro_batches)", "output[0]"),
        slow(("gradient + arrived", "arrived")),
    ],
)
def test_faults_of_the_runtime_are_found(fault: tuple[str, str]) -> None:
    assert not all(proved(seed, mesh="dp=1", fault=fault).passed for seed in (0, 2, 7))


# --- what a user says ---


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 1)
        self.join = autoshard.place(torch.cat, "worker", 2)
        autoshard.place(self.left, "worker", 1)
        autoshard.place(self.right, "MS_WORKER", 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.join([self.left(x), self.right(x)], 1)).relu().mean()


def towers() -> tuple[nn.Module, tuple[Tensor]]:
    return Towers(), (torch.randn(4, 4),)


@cache
def towers_graph() -> Graph:
    return capture(f"{__file__}:towers", {})


def test_modules_and_functions_are_placed() -> None:
    graph = towers_graph()
    request = with_requests(StepRequest(), graph)
    places = {pin.path: pin.stage for pin in request.places}
    assert places == {"left": 1, "right": 0, "join": 2}
    where = dict(zip((op.target for op in graph.ops), op_places(graph, places), strict=True))
    assert where == {"aten.linear": 2, "aten.cat": 2, "aten.relu": 2, "aten.mean": 2}  # the head follows what it reads
    assert [part.stage for part in placed_parts(graph, [*places.items()])] in ([1, 0, 2], [0, 1, 2])
    pinned = with_requests(StepRequest(places=(StagePin("left", 0),)), graph)  # what is typed goes before
    assert {pin.path: pin.stage for pin in pinned.places} == places | {"left": 0}


def test_towers_on_two_places_run_at_the_same_time() -> None:
    graph = towers_graph()
    parts = placed_parts(graph, [("left", 0), ("right", 1), ("join", 1), ("head", 1)])
    assert [(part.stage, part.chunk) for part in parts] == [(0, 0), (1, 0), (1, 1)]  # the join is a part of its own
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=1"), load_hardware("cpu-local")), 0)
    plan = replace(plan, step=StepPlan(parts=parts))
    timeline = simulate_plan_step(plan, lower(plan, graph), graph, load_hardware("cpu-local"))
    assert [slots[0].start_seconds for slots in timeline.by_stage] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("what", "role", "rank", "message"),
    [
        (nn.ReLU(), "server", 0, "role is 'server', expected 'worker'"),
        (nn.ReLU(), "MS_SCHED", 0, "role is 'MS_SCHED'"),
        (nn.ReLU(), "", 0, "role is ''"),
        (nn.ReLU(), None, 0, "role is None"),
        (nn.ReLU(), "worker", -1, "rank is -1, expected an int from 0 on"),
        (nn.ReLU(), "worker", 1.0, "rank is 1.0"),
        (nn.ReLU(), "worker", "1", "rank is '1'"),
        (nn.ReLU(), "worker", True, "rank is True"),
        (nn.ReLU(), "worker", None, "rank is None"),
        (3, "worker", 0, "place of int: expected a module or a function"),
        ("fc1", "worker", 0, "place of str"),
        (torch.zeros(2), "worker", 0, "place of Tensor"),
        (None, "worker", 0, "place of NoneType"),
    ],
)
def test_every_mistake_has_a_sentence(what: object, role: object, rank: object, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        autoshard.place(what, role, rank)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pins", "further", "message"),
    [
        (("place:nope=1",), {}, "place of nope: no operator is in that module"),
        (("place:left=2",), {}, "worker 1 has no operator"),
        (("place:left=1", "place:right=1", "place:join=1", "place:head=1"), {}, "worker 0 has no operator"),
        (("place:left=2000000000",), {}, "worker 1 has no operator: modules are placed on 0, 2000000000"),
        (("place:left=x",), {}, "expected place:MODULE=NUMBER"),
        (("place:left=-1",), {}, "expected place:MODULE=NUMBER"),
        (("place:=1",), {}, "expected place:MODULE=NUMBER"),
        (("place:left",), {}, "expected place:MODULE=NUMBER"),
        (("place:left.3-1=1",), {}, "3 to 1 is empty"),
        (
            ("place:left=1",),
            {"stages": 3, "micro_batches": 4},
            "a module is placed on worker 1, and there are 3 workers",
        ),
        (("place:left=1", "stage:right=1"), {}, "--pin stage and places both say"),
        (("place:left=1",), {"virtual_stages": 2}, "--virtual-stages and places both say"),
        (("place:left=1",), {"schedule": "zigzag"}, "unknown schedule 'zigzag'"),
        (("place:left=1",), {"micro_batches": 10**6}, "expected at most"),
    ],
)
def test_every_pin_has_a_sentence(pins: tuple[str, ...], further: dict[str, object], message: str) -> None:
    graph = replace(towers_graph(), module_requests=())
    with pytest.raises(UsageError, match=re.escape(message)):
        request = with_requests(step_request(further, pins), graph)
        request.check()
        plan = random_plan(PlanningContext(graph, Mesh.parse("dp=1"), load_hardware("cpu-local")), 0)
        with_step(plan, graph, request)


def test_without_a_job_of_several_devices_place_has_no_effect_and_the_plan_says_so() -> None:
    request = search_request(None, None, 2, (), None, None, {}, "stand-alone")
    assert request.step.place == "none"
    plan = make_plan(towers_graph(), load_hardware("cpu-local"), request).plan
    assert plan.devices == 1 and not plan.step.parts
    assert any("place() has no effect" in note for note in plan.search.notes)
    assert "--place none" in command(plan, towers_graph())


def test_inference_on_places_is_refused_with_the_way_out() -> None:
    graph = replace(towers_graph(), loss=None, training=False)
    request = search_request(Mesh.parse("dp=1"), None, 2, (), None, None, {}, "auto")
    with pytest.raises(UsageError, match="a step of places needs a loss to train\n  try: --place none"):
        make_plan(graph, load_hardware("cpu-local"), request)
    alone = search_request(Mesh.parse("dp=1"), None, 2, (), None, None, {"place": "none"}, "auto")
    assert make_plan(graph, load_hardware("cpu-local"), alone).plan.devices == 1


def test_a_schedule_may_be_named_where_only_the_model_has_places() -> None:
    """Whether there is something to schedule is known once the model is captured."""
    request = search_request(Mesh.parse("dp=1"), None, 2, (), None, None, {"schedule": "gpipe"}, "auto")
    plan = make_plan(towers_graph(), load_hardware("cpu-local"), request).plan
    assert plan.step.schedule == "gpipe" and plan.devices == 3
    with pytest.raises(UsageError, match="--schedule is about stages, and there is one"):
        make_plan(replace(towers_graph(), module_requests=()), load_hardware("cpu-local"), request)


def test_a_difference_of_places_alone_is_said() -> None:
    graph = towers_graph()
    plan = random_plan(PlanningContext(graph, Mesh.parse("dp=1"), load_hardware("cpu-local")), 0)
    steps = [StepPlan(parts=placed_parts(graph, [("left", left), ("right", 1 - left)])) for left in (0, 1)]
    one, other = (predicted(replace(plan, step=step), graph) for step in steps)
    assert "but not the step" in plan_diff.text(plan_diff.diff(one, graph, other, graph))
    assert "but not the step" not in plan_diff.text(plan_diff.diff(one, graph, one, graph))


def test_the_summary_speaks_of_places() -> None:
    graph = captured(3)
    plan = placed(3, graph, count=1)
    simulated = simulate_plan(plan, graph, load_hardware("cpu-local"))
    words = " ".join(summary(plan, graph, timeline=simulated.timeline, step=simulated.step).split())
    assert f"mean of {plan.step.stages} places" in words and "average micro-batch on one place" in words
    assert "stage" not in words


def test_a_buffer_of_two_places_is_refused() -> None:
    graph = capture(SPEC, {"seed": 1})
    (buffer, new), *_ = graph.buffer_updates
    places = [int(buffer in op.operands) for op in graph.ops]
    places[next(i for i, op in enumerate(graph.ops) if new in op.results)] = 0
    if len(set(places)) > 1 and sum(places) < len(places):
        plan = random_plan(PlanningContext(graph, Mesh.parse("dp=1"), load_hardware("cpu-local")), 0)
        plan = replace(plan, step=StepPlan(1, parts=parts_on(graph, places)))
        with pytest.raises(UsageError, match="on one place"):
            stage_programs(lower(plan, graph))


@pytest.mark.parametrize("between", [False, True])
def test_a_weight_is_read_in_one_part_of_a_place_where_it_can_be(between: bool) -> None:
    """It waits for what comes from the other place, unless that place itself waits for it."""
    ops = (
        Op("a", "aten.linear", ("x", "w", None), (), ("a",)),
        Op("b", "aten.relu", ("a" if between else "x",), (), ("b",)),
        Op("c", "aten.linear", ("b", "w", None), (), ("c",)),
        Op("d", "aten.add", ("a", "c"), (), ("d",)),
    )
    tensors = tuple(Value(name, (4, 4), "float32") for name in "xwabcd")
    graph = Graph("g", tensors, ("x",), (Parameter("w", "w"),), (), ops, ("d",), None)
    part_ops = [part.ops for part in parts_on(graph, [0, 1, 0, 0])]
    assert part_ops == ([("a",), ("b",), ("c", "d")] if between else [("b",), ("a", "c", "d")])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_is_made_of_weights_alone_is_in_the_part_of_its_reader(elsewhere: bool) -> None:
    """Cross attention splits the rows of a packed projection; another place that reads them waits for no data."""
    ops = (
        Op("rows", "aten.split", ("w",), (), ("q", "kv")),
        Op("a", "aten.relu", ("x",), (), ("a",)),
        Op("b", "aten.linear", ("x" if elsewhere else "a", "kv", None), (), ("b",)),
        Op("c", "aten.linear", ("a", "q", None), (), ("c",)),
        Op("d", "aten.add", ("b", "c"), (), ("d",)),
    )
    tensors = tuple(Value(name, (4, 4), "float32") for name in ("x", "w", "q", "kv", "a", "b", "c", "d"))
    graph = Graph("g", tensors, ("x",), (Parameter("w", "w"),), (), ops, ("d",), None)
    part_ops = [part.ops for part in parts_on(graph, [1, 0, 2 if elsewhere else 1, 1, 1])]
    assert part_ops == ([("rows",), ("a",), ("b",), ("c",), ("d",)] if elsewhere else [("a",), ("rows", "b", "c", "d")])


@pytest.mark.parametrize("unplaced", [None, 2])
def test_what_rewrites_a_buffer_goes_where_it_is_read(unplaced: int | None) -> None:
    ops = (Op("a", "aten.mul", ("x", "m"), (), ("a",), "norm"), Op("n", "aten.add", ("x", "m"), (), ("n",)))
    tensors = tuple(Value(name, (4, 4), "float32") for name in "xman")
    graph = Graph("g", tensors, ("x",), (), (Parameter("m", "m"),), ops, ("a",), None, buffer_updates=(("m", "n"),))
    assert op_places(graph, {"norm": 1}, unplaced) == [1, 1]
    assert op_places(replace(graph, buffer_updates=()), {"norm": 1}, unplaced) == [1, unplaced or 0]
