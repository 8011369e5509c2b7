"""A plan's identity is that of its decisions: every field of its records is one, or changes nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.cli import commands
from autoshard.ir import graph_json, plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.layout import REPLICATE, Layout, Shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import (
    BlockPolicy,
    Candidate,
    Certificate,
    Fusion,
    OpPlan,
    Parts,
    PlacePlan,
    Plan,
    PlanStep,
    RedistributionPlan,
    Search,
    ServerPlan,
    SizeBucket,
    StagePart,
    StepPlan,
    TensorPlan,
)
from autoshard.ir.plan_json import DECISIONS, plan_hash
from tests.graphs import mlp_graph

GRAPH = mlp_graph(2, 64, 256)
LAYOUT, OTHER = Layout((Shard(0), REPLICATE)), Layout((REPLICATE, REPLICATE))
# What is no decision, by record; a field that is in neither table fails the first test.
BESIDE: dict[type, tuple[str, ...]] = {
    Plan: (
        "graph_hash", "model", "model_arguments", "hardware", "hardware_text", "predicted_seconds",
        "predicted_peak_bytes", "capacity_bytes", "certificate", "versions", "search",
    ),
    SizeBucket: (),
    PlacePlan: (),
    ServerPlan: (
        "step_seconds", "share_seconds", "update_seconds", "worker_busy_seconds", "server_busy_seconds", "pulled_bytes",
        "pushed_bytes", "server_bytes",
    ),
    TensorPlan: ("path", "decided_by", "parts"),
    OpPlan: ("forward_seconds", "backward_seconds", "decided_by", "parts"),
    RedistributionPlan: ("forward_seconds", "backward_seconds"),
    StepPlan: ("predicted_seconds", "predicted_peak_bytes", "capacity_bytes", "places"),  # parts say where
}  # fmt: skip
TENSOR = TensorPlan("x", "x", LAYOUT)
OP = OpPlan("linear", "b n", "", 1e-3, 2e-3)
MOVE = RedistributionPlan(
    "x", LAYOUT, OTHER, ("linear",), (PlanStep(("dp",), ("S0",), ("R",), "all_gather", "slice"),), 1e-4, 1e-4
)
STEP = StepPlan(4, "1f1b", 1, (StagePart(0, 0, "linear"),), (BlockPolicy("h.0", "input"),), 1.0, 2.0, 8, 3)
BUCKET = SizeBucket((("batch", 8),), (OP,), (MOVE,))
SERVERS = ServerPlan(2, 3, 4, 5, ("x",))
PLACE = PlacePlan(1, Mesh((("dp", 2),)), (TENSOR,), (TENSOR,), (TENSOR,), (OP,), (MOVE,))
PLAN = Plan(
    "hash", "m.py:f", (("n", 2),), Mesh((("dp", 2), ("tp", 2))), "cpu", "text", "fp32", "sgd", (TENSOR,), (TENSOR,),
    (TENSOR,), (OP,), (MOVE,), 3e-3, 10.0, 20.0, Certificate("dp", "optimal", 3e-3, 3e-3), (("torch", "2.13"),),
    Search(), STEP, (Fusion("all_reduce", "size", 25e6),), (BUCKET,), SERVERS, (PLACE,),
)  # fmt: skip
HOLDS = {TensorPlan: "parameters", OpPlan: "ops", RedistributionPlan: "redistributions", StepPlan: "step"}
HOLDS[SizeBucket], HOLDS[ServerPlan], HOLDS[PlacePlan] = "buckets", "servers", "place_plans"
RECORDS = {Plan: PLAN, TensorPlan: TENSOR, OpPlan: OP, RedistributionPlan: MOVE, StepPlan: STEP, SizeBucket: BUCKET}
RECORDS |= {ServerPlan: SERVERS, PlacePlan: PLACE}
CHANGED: dict[str, Any] = {
    "mesh": Mesh((("dp", 4),)), "layout": OTHER, "source": OTHER, "target": LAYOUT, "parts": Parts(1.0),
    "certificate": Certificate("ilp", "feasible", 1.0, 0.0),
    "search": Search(1, ("a=b",), (Candidate("c", "", 1, 1, 1),)),
    "step": replace(STEP, micro_batches=5), "steps": (), "recompute": (BlockPolicy("h.0", "expensive"),),
    "fusion": (Fusion("all_reduce", "auto", 25e6),), "places": (("h", 1),), "batch_shares": (3, 1),
    "most": (("batch", 16),), "buckets": (), "servers": replace(SERVERS, count=4), "place_plans": (),
}  # fmt: skip
FIELDS = [(kind, field.name) for kind in DECISIONS for field in dataclasses.fields(kind)]


def other(record: Any, name: str) -> Any:
    """The record with another value of a field."""
    value = getattr(record, name)
    if isinstance(record, StepPlan) and name == "parts":
        return replace(record, parts=(StagePart(0, 0, "first"),))
    if name in CHANGED:
        return replace(record, **{name: CHANGED[name]})
    changed = value + 1 if isinstance(value, int | float) else f"{value}x" if isinstance(value, str) else value + value
    return replace(record, **{name: changed})


def within(kind: type, record: Any) -> Plan:
    """A plan that has the record."""
    if kind is Plan:
        return record
    return replace(PLAN, **{HOLDS[kind]: record if kind in (StepPlan, ServerPlan) else (record,)})


def test_every_field_is_judged() -> None:
    for kind, names in DECISIONS.items():
        assert {field.name for field in dataclasses.fields(kind)} == {*names, *BESIDE[kind]}
        assert not set(names) & set(BESIDE[kind])


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name in FIELDS])
def test_only_decisions_change_it(kind: type, name: str) -> None:
    changed = other(RECORDS[kind], name)
    assert changed != RECORDS[kind]
    same = plan_hash(within(kind, changed), GRAPH) == plan_hash(within(kind, RECORDS[kind]), GRAPH)
    assert same == (name in BESIDE[kind])


@pytest.mark.parametrize("record", [StagePart(1, 0, "linear"), StagePart(0, 1, "linear")])
def test_records_of_decisions_alone_count_whole(record: StagePart) -> None:
    assert plan_hash(replace(PLAN, step=replace(STEP, parts=(record,))), GRAPH) != plan_hash(PLAN, GRAPH)


GRAPHS = {
    "name": (replace(GRAPH, name="other"), True),
    "source": (replace(GRAPH, source="elsewhere.py:build"), True),
    "lines": (replace(GRAPH, ops=tuple(replace(op, source="elsewhere.py:7") for op in GRAPH.ops)), True),
    "assumed": (replace(GRAPH, assumed=("elsewhere.py:7 is False",)), True),
    "width": (mlp_graph(2, 128, 256), False),
    "precision": (replace(GRAPH, precision="bf16-mixed"), False),
    "an operator": (replace(GRAPH, ops=(replace(GRAPH.ops[0], target="aten.relu"), *GRAPH.ops[1:])), False),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_of_the_graph_what_it_computes_counts(name: str) -> None:
    graph, same = GRAPHS[name]
    assert (plan_hash(PLAN, graph) == plan_hash(PLAN, GRAPH)) == same


def _made(folder: Path, graph: Graph, *words: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    graph_json.save(graph, folder / "m.graph.json")
    args = ["plan", str(folder / "m.graph.json"), "--mesh", "dp=2,tp=2", "--hardware", "a100-80g-sxm"]
    assert commands.main([*args, "--out", str(folder / "out"), *words]) == 0
    plan = plan_json.load(folder / "out" / "plan.json")
    text = (folder / "out" / "model_parallel.py").read_text(encoding="utf-8")
    assert plan_hash(plan, graph) in text
    return plan_hash(plan, graph)


def test_the_same_decisions_from_elsewhere(tmp_path: Path) -> None:
    """Another folder, another search, another status."""
    one = _made(tmp_path / "a", GRAPH, "--strategy", "dp")
    assert one == _made(
        tmp_path / "b" / "c", replace(GRAPH, source="b.py:x", name="x"), "--strategy", "dp", "--no-cache"
    )
    assert one == _made(tmp_path / "d", GRAPH, "--strategy", "dp", "--solver", "ilp", "--memory-limit", "79 GiB")
    assert one != _made(tmp_path / "e", GRAPH, "--strategy", "fsdp")
