"""Plans as files, and the same choices applied again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import InvalidFileError, UsageError
from autoshard.formulation.planning_context import PlanningContext
from autoshard.ir import plan_json
from autoshard.ir.layout import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Layout, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import (
    Candidate,
    Certificate,
    MeshTried,
    OpPlan,
    Parts,
    Plan,
    PlanStep,
    RedistributionPlan,
    Search,
    StepTried,
    TensorPlan,
)
from autoshard.ir.plan_json import dumps, loads
from autoshard.program.lower import chosen_strategies, lower
from autoshard.program.program_check import check
from autoshard.replay.resize import reapply
from autoshard.search.fixed_styles import random_plan
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from tests.graphs import mlp_graph

# --- plans as text: round trip, one text a plan, and a clear error for every kind of damage ---


PLACEMENTS = st.sampled_from([REPLICATE, REPLICATE_PARTIAL, PARTIAL, Shard(0), Shard(1, 3), Shard(2, 3, 64)])
LAYOUTS = st.builds(Layout, st.tuples(PLACEMENTS, PLACEMENTS))
NAMES = st.text(min_size=1, max_size=6)
SECONDS = st.floats(min_value=0, allow_infinity=False, allow_nan=False)
PARTS = st.builds(Parts, SECONDS, SECONDS, SECONDS, SECONDS, NAMES, SECONDS)
OPS = st.builds(OpPlan, NAMES, NAMES, NAMES, SECONDS, SECONDS, NAMES, PARTS)
TENSORS = st.builds(TensorPlan, NAMES, NAMES, LAYOUTS, NAMES, PARTS)
STEPS = st.builds(PlanStep, st.tuples(NAMES), st.tuples(NAMES), st.tuples(NAMES), NAMES, NAMES)
MOVES = st.builds(
    RedistributionPlan,
    NAMES,
    LAYOUTS,
    LAYOUTS,
    st.tuples(NAMES),
    st.tuples(STEPS),
    SECONDS,
    SECONDS,
)
ARGUMENTS = st.lists(st.tuples(NAMES, st.one_of(NAMES, st.integers(), SECONDS, st.booleans())), max_size=3).map(tuple)


def few(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


CANDIDATES = st.builds(Candidate, NAMES, NAMES, SECONDS, SECONDS, SECONDS)
MESHES = st.builds(MeshTried, st.just(Mesh((("dp", 4),))), NAMES, SECONDS, SECONDS, SECONDS)
BOOLEANS = st.booleans()
TRIED = st.builds(StepTried, *[st.integers(1, 9)] * 2, NAMES, *[st.integers(1, 9)] * 5, NAMES, NAMES, *[SECONDS] * 3)
SEARCHES = st.builds(
    Search, st.integers(0, 2), few(NAMES), few(CANDIDATES), few(MESHES), few(NAMES), SECONDS, BOOLEANS, BOOLEANS, NAMES,
    few(TRIED), few(NAMES),
)  # fmt: skip
PLANS = st.builds(
    Plan,
    graph_hash=NAMES,
    model=NAMES,
    model_arguments=ARGUMENTS,
    mesh=st.just(Mesh((("dp", 2), ("tp", 2)))),
    hardware=NAMES,
    hardware_text=st.text(max_size=20),
    precision=NAMES,
    optimizer=NAMES,
    inputs=few(TENSORS),
    parameters=few(TENSORS),
    buffers=few(TENSORS),
    ops=few(OPS),
    redistributions=few(MOVES),
    predicted_seconds=SECONDS,
    predicted_peak_bytes=SECONDS,
    capacity_bytes=st.one_of(SECONDS, st.just(float("inf"))),
    certificate=st.builds(Certificate, NAMES, NAMES, SECONDS, SECONDS, SECONDS, SECONDS),
    versions=few(st.tuples(NAMES, NAMES)),
    search=SEARCHES,
)


@given(PLANS)
def test_round_trip(plan: Plan) -> None:
    text = plan_json.dumps(plan)
    assert plan_json.loads(text) == plan
    assert plan_json.dumps(plan_json.loads(text)) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))


def a_plan() -> Plan:
    layout = Layout((Shard(0), REPLICATE))
    op = OpPlan("linear", "b n", "", 1e-3, 2e-3)
    step = PlanStep(("tp",), ("S0",), ("R",), "all_gather", "slice")
    move = RedistributionPlan("x", layout, layout, ("linear",), (step,), 1e-4, 1e-4)
    tensor = TensorPlan("x", "x", layout)
    mesh = Mesh((("dp", 2), ("tp", 2)))
    return Plan(
        "hash", "m.py:f", (("n", 2),), mesh, "cpu", "", "fp32", "sgd", (tensor,), (), (), (op,), (move,),
        3e-3, 10.0, 20.0, Certificate("dp", "optimal", 3e-3, 3e-3),
    )  # fmt: skip


def test_a_field_is_read_by_its_earlier_name() -> None:
    plan = dataclasses.replace(a_plan(), search=dataclasses.replace(a_plan().search, step_messages=("gap",)))
    assert loads(dumps(plan).replace('"step_messages"', '"steps_told"')) == plan


def test_a_record_takes_one_line() -> None:
    lines = plan_json.dumps(
        dataclasses.replace(a_plan(), ops=(OpPlan("a", "=", "", 0, 0), OpPlan("b", "=", "", 0, 0)))
    ).splitlines()
    assert sum('"op": "a"' in line for line in lines) == sum('"op": "b"' in line for line in lines) == 1
    assert not any('"op": "a"' in line and '"op": "b"' in line for line in lines)


DAMAGE = [
    (lambda d: d.pop("mesh"), "lacks 'mesh'"),
    (lambda d: d.update(extra=1), "unknown key 'extra'"),
    (lambda d: d.update(mesh="dp"), "expected name=size"),
    (lambda d: d.update(mesh=4), "plan.mesh is int, expected str"),
    (lambda d: d.update(predicted_seconds="soon"), "plan.predicted_seconds is str, expected a number"),
    (lambda d: d["ops"][0].update(forward_seconds=None), "plan.ops[0].forward_seconds is null"),
    (lambda d: d["inputs"][0].update(layout="Q"), "plan.inputs[0].layout: not a placement: 'Q'"),
    (lambda d: d.update(model_arguments=[["a"]]), "plan.model_arguments[0] has 1 entries, expected 2"),
    (lambda d: d.update(ops={}), "plan.ops is dict, expected a list"),
    (lambda d: d.update(schema_version=99), "schema version 99"),
    (lambda d: d.update(kind="other"), "is not an autoshard plan"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_damage_is_named(damage: object, message: str) -> None:
    data = json.loads(plan_json.dumps(a_plan()))
    damage(data)  # type: ignore[operator]
    with pytest.raises(InvalidFileError) as caught:
        plan_json.loads(json.dumps(data), "folder/plan.json")
    assert message in caught.value.message
    assert "folder/plan.json" in caught.value.message


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_json.save(a_plan(), path)
    assert plan_json.load(path) == a_plan()
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(InvalidFileError, match="No such file"):
        plan_json.load(tmp_path / "none.json")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidFileError, match="not a text file"):
        plan_json.load(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidFileError, match="is not JSON"):
        plan_json.load(path)


# --- a plan carried over to other sizes makes the same decisions ---


HARDWARE = load_hardware("a100-80g-sxm")
FULL, REDUCED = mlp_graph(layers=4, batch=32, hidden=64), mlp_graph(layers=2, batch=8, hidden=16)


def test_the_same_graph_gets_the_same_plan_back():
    plan = random_plan(PlanningContext(FULL, Mesh.parse("dp=2,tp=2"), HARDWARE), 3)
    assert reapply(plan, FULL, FULL, HARDWARE).ops == plan.ops
    assert lower(reapply(plan, FULL, FULL, HARDWARE), FULL) == lower(plan, FULL)


@pytest.mark.parametrize("seed", range(5))
def test_fewer_layers_keep_the_strategies_and_steps_of_those_that_stay(seed):
    mesh = Mesh.parse("dp=2,tp=2")
    plan = random_plan(PlanningContext(FULL, mesh, HARDWARE), seed)
    smaller = reapply(plan, FULL, REDUCED, HARDWARE)
    check(lower(smaller, REDUCED), REDUCED, chosen_strategies(smaller, REDUCED))
    decided = {op.op: op.strategy for op in plan.ops}
    assert all(decided[op.op] == op.strategy for op in smaller.ops)
    stored = {parameter.path: parameter.layout for parameter in plan.parameters}
    assert all(stored[parameter.path] == parameter.layout for parameter in smaller.parameters)


@pytest.mark.parametrize("style", ["best", "random"])
def test_a_plan_without_all_to_all_stays_one(style):
    mesh = Mesh.parse("dp=2,tp=2")
    if style == "best":
        plan = search(FULL, HARDWARE, SearchRequest(mesh, all_to_all=False))
    else:
        plan = random_plan(PlanningContext(FULL, mesh, HARDWARE, all_to_all=False), 1)
    smaller = reapply(plan, FULL, REDUCED, HARDWARE)
    for variant in (plan, loads(dumps(plan)), smaller):
        assert not variant.search.all_to_all
        actions = {action for r in variant.redistributions for s in r.steps for action in (s.forward, s.backward)}
        assert (actions or style == "best") and not actions & {"all_to_all", "exchange"}
    assert style == "best" or _exchanges(
        random_plan(PlanningContext(FULL, mesh, HARDWARE), 1)
    )  # where they are not forbidden


def _exchanges(plan):
    return any(step.forward in ("all_to_all", "exchange") for r in plan.redistributions for step in r.steps)


def test_more_layers_than_the_plan_has_are_refused():
    plan = search(REDUCED, HARDWARE, SearchRequest(Mesh.parse("dp=2")))
    with pytest.raises(UsageError, match="no counterpart at full size"):
        reapply(plan, REDUCED, FULL, HARDWARE)
