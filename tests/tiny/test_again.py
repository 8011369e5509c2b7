"""The command that a report and a package name makes the very same plan; what comes next fits the plan."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.emit.header import header_of
from autoshard.emit.readme import launch
from autoshard.ir import graph_json, plan_json
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.package.package_files import read_package
from autoshard.replay.command_line import command
from autoshard.replay.simulated_plan import simulate_plan
from autoshard.simulation import Timeline
from autoshard.simulation.step_account import one_stage
from autoshard.simulation.timeline import COMPUTE, Event, axis_stream
from autoshard.text.plan_summary import next_command
from tests.graphs import mlp_graph
from tests.slow import quick_at

ASKED = {
    "nothing": [],
    "level": ["--level", "memory"],
    "style": ["--strategy", "megatron"],
    "random": ["--strategy", "random:3"],
    "pins": ["--pin", "h.*.fc=Shard(0)@dp", "--pin", "x=((2, 1),)"],
    "limit": ["--memory-limit", "123456789 B"],
    "solver": ["--solver", "propagation", "--no-all-to-all"],
    "micro-batches": ["--global-batch", "256", "--zero", "3", "--recompute", "full"],
    "parallel optimizer": ["--enable-parallel-optimizer", "--parallel-optimizer-threshold", "0"],
}


@pytest.mark.parametrize("name", quick_at(ASKED, 3))
def test_the_same_plan_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my model.graph.json").write_text(graph_json.dumps(mlp_graph(2, 64, 256)), encoding="utf-8")
    words = ["plan", "my model.graph.json", "--mesh", "dp=2,tp=2", "--hardware", "cpu-local", "--out", "one"]
    assert commands.main([*words, *ASKED[name]]) == 0
    plan, graph, hardware = read_package(Path("one"))
    said = shlex.split(command(plan, graph))
    assert said[0] == "autoshard"
    assert commands.main([*said[1:], "--out", "other"]) == 0
    assert plan_json.dumps(plan_json.load("other/plan.json")) == plan_json.dumps(plan)
    assert header_of(simulate_plan(plan, graph, hardware).program, plan, graph).command == command(plan)


STEPS = {
    "in stages": ["--mesh", "dp=2", "--stages", "2", "--micro-batches", "4", "--pin", "stage:h.0-2=0"],
    "searched": ["--devices", "4", "--global-batch", "256"],
    "searched, in stages": ["--devices", "4", "--global-batch", "256", "--stages", "2", "--pin", "stage:h.0-2=0"],
    "searched, in parts": ["--devices", "2", "--global-batch", "256", "--virtual-stages", "2", "--zero", "0"],
    "searched, leaner": ["--devices", "4", "--global-batch", "256", "--level", "memory", "--recompute", "full,none"],
}


@pytest.mark.parametrize("name", quick_at(STEPS, 2, 4))
def test_the_same_whole_step_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what is told of the search, which is of fewer choices."""
    monkeypatch.chdir(tmp_path)
    Path("m.graph.json").write_text(graph_json.dumps(mlp_graph(5, 64, 64)), encoding="utf-8")
    words = ["plan", "m.graph.json", "--hardware", "a100-80g-sxm", "--out"]
    assert commands.main([*words, "one", *STEPS[name]]) == 0
    plan, _, _ = read_package(Path("one"))
    assert commands.main([*shlex.split(command(plan))[1:], "--out", "other"]) == 0
    other = plan_json.load("other/plan.json")
    assert replace(other, search=plan.search) == plan
    assert command(other) == command(plan)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "m.graph.json").write_text(graph_json.dumps(mlp_graph(2, 64, 256)), encoding="utf-8")
    words = ["plan", str(folder / "m.graph.json"), "--mesh", "dp=2", "--hardware", "a100-80g-sxm"]
    assert commands.main([*words, "--out", str(folder / "out")]) == 0
    return plan_json.load(folder / "out" / "plan.json")


def test_inference_and_arguments(plan: Plan) -> None:
    named = replace(plan, model="net.py:build", model_arguments=(("name", "a b"), ("n", 2)))
    assert "--with 'name=a b' n=2 " in command(named)
    assert command(named, replace(mlp_graph(2, 64, 256), training=False)).count("--eval") == 1
    assert "--eval" not in command(named)


def test_what_comes_next(plan: Plan) -> None:
    graph = mlp_graph(2, 64, 256)
    assert (
        next_command(plan, graph, "out")
        == "torchrun --nproc-per-node 2 out/train.py --backend gloo --steps 5  # on the CPUs here"
    )
    many = replace(plan, mesh=Mesh.parse("dp=20"))
    assert next_command(many, graph, "out") == "out/README.md says how to start it on 3 nodes"
    without = replace(graph, loss=None)
    assert next_command(plan, without, "out").startswith("out/README.md shows")  # a saved graph can't be verified
    named = replace(plan, model="a.py:b")
    assert next_command(named, without, "out").startswith("autoshard verify out; out/README.md shows")
    assert next_command(named, without, "out", verified=True).startswith("out/README.md shows")


NODES = [
    ((8,), "One node:\n\n```\ntorchrun --nproc-per-node 8 train.py"),
    ((8, 8), "2 nodes of 8 devices; on each (`NODE` is 0 on the first):\n\n```\ntorchrun --nnodes 2 "),
    ((8, 8, 4), "3 nodes of 8 devices; on each (`NODE` is 0 on the first, and `--nproc-per-node 4` on the last):"),
    ((2, 4), "2 nodes; on each (`NODE` is 0 on the first, `DEVICES` is 2 and 4 in their order):"),
]


@pytest.mark.parametrize(("nodes", "said"), NODES)
def test_how_a_package_is_launched(nodes: tuple[int, ...], said: str) -> None:
    assert launch(nodes).startswith(said)


def test_what_only_communicates() -> None:
    """Compute 0 to 2 and 3 to 4, communication 1 to 2.5 and 3.5 to 5, nothing from 2.5 to 3."""
    spans = [(COMPUTE, 0, 2), (COMPUTE, 3, 1), (axis_stream("dp"), 1, 1.5), (axis_stream("tp"), 3.5, 1.5)]
    events = tuple(
        Event("", stream, start, takes, "forward", 0, "", "", collective="" if stream == COMPUTE else "all_reduce")
        for stream, start, takes in spans
    )
    timeline = Timeline(events, 5.0, ((COMPUTE, 3.0),), (), 0.0, 0.0, (), 0.0)
    assert one_stage(timeline).mean.exposed_seconds == pytest.approx(1.5)
