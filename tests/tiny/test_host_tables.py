"""A table in host memory: what it takes of device and host, what its look-ups take of a step, when it goes there."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autoshard import costs, rules
from autoshard.cluster.hardware import Hardware, load_hardware, parse_hardware
from autoshard.constraints.host_offers import plan_host_bytes
from autoshard.errors import InfeasibleError, InvalidFileError, UsageError
from autoshard.formulation.formulate import formulate
from autoshard.formulation.planning_context import PlanningContext
from autoshard.formulation.step_resources import step_resources
from autoshard.ir import plan_json
from autoshard.ir.graph import Graph, Op, Parameter, Saved, Tensor
from autoshard.ir.layout import Layout
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.program.lower import lower
from autoshard.search.fixed_styles import plan_of_choice
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.simulation import simulate
from autoshard.simulation.timeline import HOST_LINK, HOST_MEMORY
from autoshard.solvers.heuristics.random_plans import random_choice
from autoshard.text.explain import explain

A100 = load_hardware("a100-80g-sxm")
ROWS, WIDTH, BATCH = 4096, 64, 32
TABLE = ROWS * WIDTH * 4
STATE = 4 * TABLE  # with its gradient and the two moments of AdamW


def model(tied: bool = False, tables: int = 1, batch: int = BATCH) -> Graph:
    """Look-ups, summed, through a linear layer (the first table itself where `tied`), against targets."""
    out = ROWS if tied else 8
    tensors = [Tensor("ids", (batch,), "int64"), Tensor("y", (batch, out), "float32")]
    parameters, ops, x = [], [], ""
    for n in range(tables):
        tensors += [Tensor(f"t{n}", (ROWS, WIDTH), "float32", True), Tensor(f"e{n}", (batch, WIDTH), "float32", True)]
        parameters.append(Parameter(f"t{n}", f"tables.{n}.weight"))
        attributes = (("padding_idx", -1), ("scale_grad_by_freq", False), ("sparse", False))
        ops.append(
            Op(f"e{n}", "aten.embedding", (f"t{n}", "ids"), attributes, (f"e{n}",), f"tables.{n}", "", Saved((1,)))
        )
        if n:
            tensors.append(Tensor(f"s{n}", (batch, WIDTH), "float32", True))
            ops.append(Op(f"s{n}", "aten.add", (x, f"e{n}"), (("alpha", 1),), (f"s{n}",)))
        x = f"s{n}" if n else f"e{n}"
    weight = "t0" if tied else "w"
    if not tied:
        tensors.append(Tensor("w", (out, WIDTH), "float32", True))
        parameters.append(Parameter("w", "head.weight"))
    tensors += [Tensor("z", (batch, out), "float32", True), Tensor("loss", (), "float32", True)]
    ops.append(Op("z", "aten.linear", (x, weight, None), (), ("z",), "head", "", Saved((0, 1))))
    ops.append(Op("loss", "aten.mse_loss", ("z", "y"), (("reduction", 1),), ("loss",), "", "", Saved((0, 1))))
    return Graph(
        "m", tuple(tensors), ("ids", "y"), tuple(parameters), (), tuple(ops), ("loss",), "loss", source="m.py:m"
    )


def planned(graph: Graph, mesh: str, hardware: Hardware = A100, **request: object) -> Plan:
    return search(graph, hardware, SearchRequest(mesh=Mesh.parse(mesh), **request))  # type: ignore[arg-type]


def on_host(plan: Plan) -> list[str]:
    return [parameter.path for parameter in plan.parameters if parameter.layout.host]


def test_layouts_and_strategies_say_it_and_read_back() -> None:
    layout = Layout.parse("S0 R host")
    assert layout.host and str(layout) == "S0 R host" and layout != Layout.parse("S0 R")
    assert layout.replace(1, layout.placements[0]).host
    graph, mesh = model(), Mesh.parse("dp=2")
    known = rules.granularities(graph, mesh)
    strategy = rules.find(graph, graph.ops[0], mesh, known, "vocabulary host")
    assert str(strategy) == "vocabulary host" and strategy.host and str(strategy.operands[0]) == "S0 host"
    with pytest.raises(UsageError, match=r"e0 .*never summed over devices"):
        rules.find(graph, graph.ops[0], mesh, known, "i0 host")


def test_a_look_up_takes_the_link_and_a_share_of_host_memory() -> None:
    graph, mesh = model(), Mesh.parse("dp=1")
    strategy = rules.find(graph, graph.ops[0], mesh, rules.granularities(graph, mesh), "= host")
    forward, backward = costs.op_seconds(A100, mesh, graph, graph.ops[0], strategy)
    ids, rows, link, memory = BATCH * 8, BATCH * WIDTH * 4, 31.5e9 * 0.8, 409.6e9 * 0.5 / 8  # of 8 devices a node
    assert forward == pytest.approx(2 * 10e-6 + (ids + rows) / link + (2 * rows + ids) / memory)
    assert backward == pytest.approx(10e-6 + rows / link + (TABLE + 3 * rows) / memory)  # a dense gradient
    seconds = costs.optimizer_seconds(A100, graph, graph.parameters[0], Layout.parse("R host"), mesh)
    assert seconds == pytest.approx(7 * TABLE / memory)


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2", "dp=2,tp=2"])
def test_a_pinned_table_leaves_the_device(mesh: str) -> None:
    graph = model()
    here = planned(graph, mesh, pins=("tables.0.weight=device",))
    there = planned(graph, mesh, pins=("tables.0.weight=host",))
    assert on_host(here) == [] and on_host(there) == ["tables.0.weight"]
    layout = there.parameters[0].layout
    parts = costs.host_bytes(graph, graph.parameters[0], layout, there.mesh)
    assert plan_host_bytes(there, graph) == parts > 0 == plan_host_bytes(here, graph)
    program = lower(there, graph)
    step = simulate(program, graph, A100)
    assert not any(held.name.startswith("tables") or held.name == "t0" for held in step.peak_tensors)
    assert there.predicted_peak_bytes < here.predicted_peak_bytes - STATE / Mesh.parse(mesh).size / 2
    assert step.busy(HOST_LINK) > 0 and step.busy(HOST_MEMORY) > 0
    names = [event.name for event in step.events if event.stream in (HOST_LINK, HOST_MEMORY)]
    assert names == [
        "e0: to host", "e0: look up", "e0: to device", "e0: to host", "e0: look up", "adamw on the host"
    ]  # fmt: skip
    assert plan_json.loads(plan_json.dumps(there)) == there


def test_nothing_is_issued_while_the_host_looks_up() -> None:
    graph = model()
    plan = planned(graph, "dp=1", pins=("tables.0.weight=host",))
    slow = parse_hardware(A100.text.replace('"409.6 GB/s"', '"1 MB/s"'))
    events = {event.name: event for event in reversed(simulate(lower(plan, graph), graph, slow).events)}
    ended = events["e0: look up"].end_seconds
    assert ended > 0.1
    assert events["z"].start_seconds >= ended + slow.constant("host.dispatch") > ended


def test_no_plan_is_quicker_than_the_bound() -> None:
    """Of random plans, with tables on either side."""
    graph, mesh, sides = model(tables=3), Mesh.parse("dp=2"), set()
    formulation = formulate(PlanningContext(graph, mesh, A100, on_host=frozenset({"t0", "t1", "t2"})))
    resources = step_resources(formulation)
    for seed in range(40):
        choice = random_choice(formulation.problem, seed)
        plan = plan_of_choice(formulation, choice, None, "random")
        sides.add(len(on_host(plan)))
        bound = resources.longest(resources.least_used(choice))
        assert bound <= plan.predicted_seconds * (1 + 1e-9), (seed, on_host(plan))
    assert {0, 1, 2, 3} == sides


def test_a_table_that_fits_no_device_is_put_on_the_host() -> None:
    graph = model(tables=2)
    assert on_host(planned(graph, "dp=1")) == []
    small = planned(graph, "dp=1", memory_limit_bytes=1.5 * STATE)  # one of the two fits
    assert len(on_host(small)) == 1 and small.predicted_peak_bytes <= 1.5 * STATE
    none = planned(graph, "dp=1", memory_limit_bytes=0.5 * STATE)
    assert len(on_host(none)) == 2
    without = parse_hardware(A100.text.replace(A100.text[A100.text.index("[host]") : A100.text.index("[[links]]")], ""))
    assert without.host is None
    with pytest.raises(InfeasibleError):
        planned(graph, "dp=1", without, memory_limit_bytes=0.5 * STATE)
    with pytest.raises(UsageError, match=r"has no \[host\]: nothing can be placed on the host"):
        planned(graph, "dp=1", without, pins=("tables.0.weight=host",))


def test_a_table_makes_room_for_what_fits_only_without_it() -> None:
    """By itself it fits the device, and all parameters are small beside its memory."""
    graph = model(batch=32768)
    here = planned(graph, "dp=1")
    assert here.predicted_peak_bytes > 4 * STATE
    limit = here.predicted_peak_bytes - STATE / 2
    there = planned(graph, "dp=1", memory_limit_bytes=limit)
    assert on_host(there) == ["tables.0.weight"] and there.predicted_peak_bytes <= limit
    assert explain(there, graph, A100, "tables.0.weight", "device").why_not is not None


def test_why_a_table_is_not_elsewhere() -> None:
    graph = model()
    plan = planned(graph, "dp=1")
    why = explain(plan, graph, A100, "tables.0", "host").why_not
    assert why is not None and not why.reason and why.objective_seconds > plan.certificate.objective_seconds
    assert "tables.0.weight: R -> R host" in why.changed
    same = explain(plan, graph, A100, "tables.0.weight", "device").why_not
    assert same is not None and same.reason == "this is already the chosen strategy"
    with pytest.raises(UsageError, match="it looks nothing up"):
        explain(plan, graph, A100, "head", "host")


@pytest.mark.parametrize(("here", "there"), [("host", "device"), ("device", "host")])
@pytest.mark.parametrize("what", ["tables.0", "tables.0.weight"])
def test_the_pin_of_a_table_is_named_also_at_its_look_ups(what: str, here: str, there: str) -> None:
    pins = (f"tables.0.weight={here}", "head=n@dp")
    plan, graph = planned(model(), "dp=2", pins=pins), model()
    why = explain(plan, graph, A100, what, there).why_not
    assert why is not None and why.reason == f"a pin decided this: {pins[0]}; plan again without it"
    why = explain(plan, graph, A100, "tables.0", "Shard(0)@dp,host").why_not
    assert why is not None and "offers nothing like that in the memory of the host" in why.reason


def test_the_hosts_memory_is_a_limit_too() -> None:
    graph = model(tables=2)

    def with_memory(size: float) -> Hardware:
        return parse_hardware(A100.text.replace('"2 TiB"', f'"{size * 8 / 0.8 / 1024:.0f} KiB"'))

    limits = {"memory_limit_bytes": 0.5 * STATE}
    assert len(on_host(planned(graph, "dp=1", with_memory(2.1 * STATE), **limits))) == 2
    with pytest.raises(InfeasibleError, match=r"the tables on the host take .* its host has"):
        planned(graph, "dp=1", with_memory(1.5 * STATE), **limits)
    with pytest.raises(InfeasibleError):
        planned(graph, "dp=1", with_memory(0.9 * STATE), **limits)
    with pytest.raises(UsageError, match="no part of it fits"):
        planned(graph, "dp=1", with_memory(0.9 * STATE), pins=("tables.0.weight=host",))


@pytest.mark.parametrize(
    ("graph", "pin", "words"),
    [
        (model(tied=True), "tables.0.weight=host", r"can't lie on the host: z \(aten.linear\) reads it too"),
        (model(), "head.weight=host", r"tables that can: tables.0.weight"),
        (model(), "op:z=host", r"z \(aten.linear in head\) can't run on the host: it looks nothing up"),
        (model(), "ids=host", "ids can't lie on the host: it is no parameter"),
        (model(), "op:e0=host,Shard(0)@dp", "e0 .* in the memory of the host .*never summed over devices"),
    ],
)
def test_refused_with_its_reason(graph: Graph, pin: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(graph, "dp=2", pins=(pin,))
    assert re.search(words, f"{caught.value.message} {caught.value.hint}"), caught.value


def test_a_profiles_host_is_checked() -> None:
    with pytest.raises(InvalidFileError, match=r"host.link_bandwdith: unknown key .* did you mean 'link_bandwidth'"):
        parse_hardware(A100.text.replace("link_bandwidth", "link_bandwdith"))
    assert replace(A100, host=None).host_memory_bytes == 0 < A100.host_memory_bytes
