"""Exports of a simulated step: what a reader of each format finds in it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.errors import UsageError
from autoshard.exports.chakra import execution_trace, group_of
from autoshard.exports.export_files import export
from autoshard.exports.kineto import STEPS, profiler_trace
from autoshard.exports.memory_snapshot import memory_snapshot
from autoshard.ir.mesh import Mesh
from autoshard.simulation import simulate
from autoshard.simulation.memory_curve import plan_memory
from tests.small_programs import mlp

A100 = load_hardware("a100-80g-sxm")
MESH = Mesh.parse("dp=2,tp=2")
GRAPH, PROGRAM = mlp(MESH, 8, 64, 64, 2)
TIMELINE = simulate(PROGRAM, GRAPH, A100)


def test_groups_by_hand() -> None:
    mesh = Mesh.parse("pp=2,dp=2,tp=2")
    assert group_of(mesh, ("tp",), 5) == (4, 5)
    assert group_of(mesh, ("pp", "tp"), 0) == (0, 1, 4, 5)
    assert group_of(mesh, ("dp",), 7) == (5, 7)


def test_every_kernel_has_its_launch_and_operator() -> None:
    trace = profiler_trace(TIMELINE, MESH, 3, 1e-5)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    by_kind = {kind: [e for e in events if e["cat"] == kind] for kind in ("kernel", "cuda_runtime", "cpu_op")}
    assert all(len(of_kind) == STEPS * len(TIMELINE.events) for of_kind in by_kind.values())
    launches = {e["args"]["correlation"]: e for e in by_kind["cuda_runtime"]}
    for kernel in by_kind["kernel"]:
        launch = launches[kernel["args"]["correlation"]]
        assert launch["ts"] <= kernel["ts"] and kernel["args"]["device"] == 3
    steps = [e["name"] for e in events if e["cat"] == "user_annotation"]
    assert steps == [f"ProfilerStep#{n}" for n in range(STEPS)]
    assert trace["distributedInfo"] == {"backend": "nccl", "rank": 3, "world_size": 4}


def test_collectives_name_their_group() -> None:
    events = profiler_trace(TIMELINE, MESH, 3)["traceEvents"]
    talks = [e for e in events if e.get("cat") == "kernel" and e["name"].startswith("ncclDevKernel_AllReduce")]
    assert {e["args"]["Process Group Ranks"] for e in talks} == {"[2, 3]", "[1, 3]"}
    assert all(e["args"]["Group size"] == 2 for e in talks)


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            return value, place


def read_message(data: bytes) -> dict[int, list[Any]]:
    """Field number -> its values; nested messages stay bytes."""
    fields: dict[int, list[Any]] = {}
    place = 0
    while place < len(data):
        key, place = read_varint(data, place)
        if key & 7 == 0:
            value, place = read_varint(data, place)
        elif key & 7 == 1:
            value, place = data[place : place + 8], place + 8
        else:
            size, place = read_varint(data, place)
            value, place = data[place : place + size], place + size
        fields.setdefault(key >> 3, []).append(value)
    return fields


def read_trace(data: bytes) -> list[dict[int, list[Any]]]:
    messages, place = [], 0
    while place < len(data):
        size, place = read_varint(data, place)
        messages.append(read_message(data[place : place + size]))
        place += size
    return messages


def test_chakra_nodes_are_the_events() -> None:
    metadata, *nodes = read_trace(execution_trace(TIMELINE, MESH))
    assert metadata[1] == [b"0.0.4"]
    assert len(nodes) == len(TIMELINE.events)
    for number, (node, event) in enumerate(zip(nodes, TIMELINE.events, strict=True)):
        assert node.get(1, [0]) == [number] and node[2] == [event.name.encode()]
        assert node[3] == [7 if event.collective else 4]
        assert tuple(node.get(5, [])) == event.waits
        attributes = {read_message(a)[1][0].decode(): read_message(a) for a in node[10]}
        assert ("comm_size" in attributes) == bool(event.collective)
        if event.collective:
            assert attributes["comm_size"][9] == [int(event.bytes)] and attributes["comm_type"][9] == [0]


def test_the_memory_snapshot_adds_up() -> None:
    memory = plan_memory(PROGRAM, GRAPH)
    snapshot = pickle.loads(memory_snapshot(memory, TIMELINE.starts))
    alive = peak = 0
    held: dict[int, int] = {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in held, "two tensors at one address"
            held[entry["addr"]] = entry["size"]
            alive += entry["size"]
        elif entry["action"] == "free_completed":
            alive -= held.pop(entry["addr"])
        peak = max(peak, alive)
    rounding = 512 * len(memory.spans)
    assert max(memory.bytes) <= peak <= max(memory.bytes) + rounding
    (segment,) = snapshot["segments"]
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    active = [b for b in segment["blocks"] if b["state"] == "active_allocated"]
    assert {b["address"]: b["size"] for b in active} == held


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("profiler", [f"rank{r}.json" for r in range(4)]),
        ("chakra", [f for r in range(4) for f in (f"groups.{r}.json", f"step.{r}.et")]),
        ("memory", ["memory.pickle"]),
    ],
)
def test_files(name: str, files: list[str], tmp_path: Path) -> None:
    written = export(name, tmp_path / "out", TIMELINE, PROGRAM, GRAPH, A100)
    assert sorted(written) == sorted(files) == sorted(p.name for p in (tmp_path / "out").iterdir())
    if name == "chakra":
        assert json.loads((tmp_path / "out" / "groups.3.json").read_text()) == {"1": [1, 3], "2": [2, 3]}


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        export("memory", tmp_path / "out", TIMELINE, PROGRAM, GRAPH, A100)
