"""Whole steps chosen together, on captured models: against every plan simulated, and what the choice must keep to."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.api import verbs
from autoshard.api.step_answer import StepAnswer, planned_step
from autoshard.cli.commands import main
from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.errors import InfeasibleError, UsageError
from autoshard.graph_capture.capture import capture
from autoshard.ir.graph import Graph
from autoshard.ir.graph_check import check
from autoshard.ir.graph_json import dumps
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan_json import load
from autoshard.program.lower import lower
from autoshard.replay.command_line import command
from autoshard.search.build_plan import Origin
from autoshard.search.objectives import MEMORY, SPEED
from autoshard.search.search_request import SearchRequest
from autoshard.simulation import simulate
from autoshard.simulation.step_timeline import simulate_step
from autoshard.solvers.stages.stage_partition import solve_stages
from autoshard.solvers.stages.stage_problem import StagePlan
from autoshard.text.stage_table import step_cells
from autoshard.text.step_text import why_not
from autoshard.verification import verify_package
from autoshard.whole_step_search.best_first import best_of_each
from autoshard.whole_step_search.blocks.block_costs import BlockCosts, HeldParameters
from autoshard.whole_step_search.blocks.block_line import block_line, shortened
from autoshard.whole_step_search.blocks.block_measure import block_costs
from autoshard.whole_step_search.blocks.block_splits import block_splits
from autoshard.whole_step_search.blocks.context_expert_axes import TENSOR
from autoshard.whole_step_search.config_space import (
    ConfigSpace,
    ParallelConfig,
    parallel_configs,
)
from autoshard.whole_step_search.front_store import FrontStore, measured_replicas
from autoshard.whole_step_search.joint_plan import joint_plan, step_seconds
from autoshard.whole_step_search.joint_search import joint_search
from autoshard.whole_step_search.solved_steps import JointResult
from autoshard.whole_step_search.step_costs import StepProblem
from autoshard.whole_step_search.step_request_space import searched_step
from tests.slow import quick_at
from tests.stage_brute_force import every_plan
from tests.tiny.test_stage_rooms import found_of

GPT2 = Path(__file__).resolve().parents[2] / "examples" / "gpt2.py:build"


@cache
def gpt2(layers: int = 4) -> Graph:
    sizes = {"batch": 4, "sequence": 128, "n_layer": layers, "n_embd": 256, "n_head": 4, "vocabulary": 1000}
    return capture(str(GPT2), sizes, "bf16-mixed")


@cache
def hardware() -> Hardware:
    return load_hardware("a100-80g-sxm")


def space(graph: Graph, devices: int, batch: int, **fixed: object) -> ConfigSpace:
    line = block_line(graph)
    return ConfigSpace(devices, batch, len(line.blocks), max(map(len, line.runs())), **fixed)  # type: ignore[arg-type]


def test_equal_layers_are_one_kind_and_a_short_graph_keeps_three_of_them() -> None:
    line = block_line(gpt2(6))
    assert [block.kind for block in line.blocks] == [0, *[1] * 6, 2]
    assert [block.module for block in line.blocks[1:-1]] == [f"transformer.h.{n}" for n in range(6)]
    short = shortened(line)
    check(short.graph)
    assert short.sources == (0, 1, 2, 3, 7) and short.represents == {0: 0, 1: 2, 2: 4}


def test_blocks_of_the_short_graph_cost_what_the_whole_program_takes() -> None:
    """The step of six layers simulated whole, and as three layers of which one stands for all; gradients are summed
    once a step, apart from blocks."""
    graph = gpt2(6)
    short = shortened(block_line(graph))
    split = block_splits(short.graph, Mesh(((TENSOR, 2),)), hardware())[0]
    costs = block_costs(short, split, hardware())
    line = [costs[short.represents[block.kind]] for block in block_line(graph).blocks]
    whole = block_splits(graph, Mesh(((TENSOR, 2),)), hardware())[0]
    body = lower(whole.plan, graph)
    timeline = simulate(replace(body, gradient_buckets=()), graph, hardware())
    forward_and_backward = max(e.end_seconds for e in timeline.events if e.phase != "optimizer")
    predicted = sum(block.forward_seconds + block.backward_seconds for block in line)
    assert predicted == pytest.approx(forward_and_backward, rel=0.03)


def everything(result_space: ConfigSpace, graph: Graph, capacity: float) -> float:
    """The fastest simulated step over all outer choices, splits, cuts and points."""
    return min(seconds for seconds, peak in every_step(result_space, graph) if peak <= capacity)


def every_step(result_space: ConfigSpace, graph: Graph) -> Iterator[tuple[float, float]]:
    """(seconds, bytes of the fullest device) of all of them, as they are simulated, whether they fit or not."""
    for problem, plan in every_plan_of(result_space, graph):
        step = simulate_step(problem.step_costs(plan))
        yield step.step_seconds, max(step.peak_bytes)


def every_plan_of(result_space: ConfigSpace, graph: Graph) -> Iterator[tuple[StepProblem, StagePlan]]:
    line = block_line(graph)
    replicas = measured_replicas(parallel_configs(result_space, hardware()))
    store, kinds = FrontStore(line, hardware(), replicas=replicas), tuple(block.kind for block in line.blocks)
    for choice in sorted(parallel_configs(result_space, hardware()), key=lambda choice: -choice.micro_batch):
        for split in store.costs(choice.inner, choice.micro_batch) if choice.zero else ():
            store.sharded(split)  # what shards change is measured with the largest micro-batch
    named = {block.kind for block in line.blocks if block.module}
    keeps = tuple(result_space.keeps if kind in named else ("all",) for kind in range(max(kinds) + 1))
    for choice in parallel_configs(result_space, hardware()):
        for split in store.costs(choice.inner, choice.micro_batch):
            sharded = store.sharded(split) if choice.zero else ()
            problem = StepProblem(choice, kinds, split.costs, keeps, hardware(), 1e15, None, sharded)
            seen = set()
            for plan in every_plan(problem.stage_problem):
                counted = tuple(
                    tuple(sorted(plan.points[part.first : part.stop])) + (part.first,) for part in plan.parts
                )  # equal blocks can be exchanged within a part
                if counted in seen:
                    continue
                seen.add(counted)
                yield problem, plan


@pytest.mark.parametrize(
    ("room", "batch"),
    [
        pytest.param(1.0, 8, marks=pytest.mark.slow),
        (0.7, 16),
        pytest.param(0.7, 8, marks=pytest.mark.slow),
    ],
)
def test_the_searched_step_is_the_best_of_all_or_within_half_a_percent(room: float, batch: int) -> None:
    graph = gpt2(3)
    configs = space(graph, 4, batch, micro_batch=(2,), stages=(1, 2), tensor=(1, 2))
    free = joint_search(graph, hardware(), configs, hardware().usable_memory_bytes)
    capacity = room * free.best.peak_bytes
    joint = joint_search(graph, hardware(), configs, capacity)
    best = everything(configs, graph, capacity)
    assert joint.best.peak_bytes <= capacity
    assert best * (1 - 1e-9) <= joint.best.seconds <= 1.005 * best
    assert joint.bound <= best * (1 + 1e-9)


def block_of(full: float, lean: float) -> BlockCosts:
    """Three seconds of which nothing is held but what is kept for backward; or four."""
    nothing = HeldParameters()
    kept_bytes, working = (("all", full), ("input", lean)), (("all", 0.0), ("input", 0.0))
    return BlockCosts(1.0, 2.0, (("all", 0.0), ("input", 1.0)), kept_bytes, working, 0.0, 0.0, nothing, nothing)


@pytest.mark.parametrize("room", quick_at([11e9, 13e9, 14e9, 18e9, 20e9, 21e9, 23e9], 0))
def test_what_a_stage_holds_more_than_its_mean_is_withheld_until_the_step_fits(room: float) -> None:
    """Two parts on each of two stages; the first one keeps most and runs ahead. Every plan simulated is the oracle."""
    costs = (block_of(3e9, 3e9), block_of(1e9, 2e8), block_of(1e8, 1e8))
    choice = ParallelConfig(2, 2, "interleaved", 1, 1, 1, 8, 0)
    keeps = (("all",), ("all", "input"), ("all",))
    problem = StepProblem(choice, (0, *[1] * 8, 2), costs, keeps, hardware(), room)
    solution = solve_stages(problem.stage_problem, 1e-3)
    assert solution is not None
    peak = max(simulate_step(problem.step_costs(solution)).peak_bytes)
    assert (peak > room) == (room < 22e9)  # the form counts the mean of both parts
    free = replace(problem, capacity_bytes=1e15)
    steps = (simulate_step(free.step_costs(plan)) for plan in every_plan(free.stage_problem))
    fitting = [step.step_seconds for step in steps if max(step.peak_bytes) <= room]
    if not fitting:
        with pytest.raises(InfeasibleError):
            found_of(SPEED, [(problem, None)])
        return
    joint = found_of(SPEED, [(problem, None)]).best
    assert joint.peak_bytes <= room and joint.seconds == pytest.approx(min(fitting))


@pytest.mark.parametrize("room", quick_at([8e9, 9.5e9, 10.5e9, 14e9], 0))
def test_copies_of_shared_parameters_take_room_where_their_block_stands(room: float) -> None:
    """The second of six blocks reads what the first one has too, and needs not stand on the last stage."""
    plain = block_of(1e9, 5e8)
    costs = (plain, plain, replace(plain, shared=HeldParameters(4e9)), replace(plain, held=HeldParameters(6e9)))
    choice = ParallelConfig(2, 1, "1f1b", 1, 1, 1, 4, 0)
    problem = StepProblem(choice, (0, 2, 1, 1, 1, 3), costs, (("all", "input"),) * 4, hardware(), room)
    free = replace(problem, capacity_bytes=1e12)
    steps = [simulate_step(free.step_costs(plan)) for plan in every_plan(free.stage_problem)]
    fastest = min((step.step_seconds for step in steps if max(step.peak_bytes) <= room), default=None)
    if fastest is None:
        with pytest.raises(InfeasibleError):
            found_of(SPEED, [(problem, None)])
        return
    joint = found_of(SPEED, [(problem, None)])
    assert joint.best.peak_bytes <= room and joint.bound <= fastest * (1 + 1e-9)
    assert joint.best.seconds == pytest.approx(fastest)
    leanest = found_of(MEMORY, [(problem, None)])
    assert leanest.best.peak_bytes <= room
    assert leanest.bound <= min(max(step.peak_bytes) for step in steps) * (1 + 1e-9)


def test_the_fastest_split_of_each_choice_stands_in_order() -> None:
    rows = [("a", 3.0), ("b", 2.0), ("a", 1.0), ("b", 4.0), ("c", 2.5)]
    of = SimpleNamespace
    splits: Any = [of(problem=of(choice=c), seconds=s, peak_bytes=0.0, value=lambda level, s=s: s) for c, s in rows]
    ranked = best_of_each(splits, SPEED)
    assert [(split.problem.choice, split.seconds) for split in ranked] == [("a", 1.0), ("b", 2.0), ("c", 2.5)]


def picked(joint: JointResult) -> tuple[int, int, int]:
    choice = joint.best.problem.choice
    return choice.stages, choice.tensor, choice.micro_batch


def test_what_is_fixed_is_kept_and_pins_put_blocks_on_stages() -> None:
    graph = gpt2()
    configs = space(graph, 4, 16, stages=(2,), tensor=(2,), virtual_stages=(1,), micro_batch=(2, 4), pinned=True)
    pinned = joint_search(graph, hardware(), configs, hardware().usable_memory_bytes, stage_of={1: 0, 2: 1})
    assert picked(pinned)[:2] == (2, 2)
    assert [(part.first, part.stop) for part in pinned.best.plan.parts] == [(0, 2), (2, 6)]


def test_nothing_fits_and_nothing_divides() -> None:
    graph = gpt2()
    with pytest.raises(InfeasibleError, match="even shares of the least memory need"):
        joint_search(graph, hardware(), space(graph, 2, 8, stages=(1,), micro_batch=(2,), zero=(0,)), 1e6)
    with pytest.raises(InfeasibleError, match="not divided by 3 stages"):
        joint_search(graph, hardware(), space(graph, 4, 8, stages=(3,)), 1e12)
    with pytest.raises(InfeasibleError, match="6 blocks for 8 stages, which are cut between blocks"):
        joint_search(graph, hardware(), space(graph, 8, 64, stages=(8,)), 1e12)


def test_the_command_writes_the_step_that_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints, the JSON and the plan in the package speak of one step."""
    saved, out = tmp_path / "gpt2.graph.json", tmp_path / "out"
    saved.write_text(dumps(gpt2()), encoding="utf-8")
    argv = ["plan", str(saved), "--precision", "bf16-mixed", "--devices", "4", "--global-batch", "16"]
    argv += ["--hardware", "a100-80g-sxm", "--out", str(out), "--stages", "2", "--virtual-stages", "1"]
    argv += ["--recompute", "full"]
    assert main([*argv, "--micro-batch", "2", "--zero", "1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    best = summary["searched_step"]["best"]
    plan = load(out / "plan.json")
    assert plan.step.zero == best["zero"] == 1
    assert best["stages"] == plan.step.stages == 2 and best["replicas"] * best["micro_batch"] == 4
    assert [part["first_op"] for part in best["parts"]] == [part.first_op for part in plan.step.parts]
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    slots = [event for event in events if event["ph"] == "X" and event["tid"] == 0 and event["cat"] == "forward"]
    assert len(slots) == 2 * best["micro_batches"] and (out / "stages.svg").read_text().startswith("<svg")
    assert best["recompute"] == {policy.module: policy.keep for policy in plan.step.recompute}
    assert plan.certificate.status == "feasible"  # what was solved is the rest of a split that was chosen before
    assert plan.step.predicted_seconds == summary["searched_step"]["program_seconds"]
    # The program's first forward waits for the host to start each weight's gather (70 in all); the search doesn't
    assert best["step_seconds"] == pytest.approx(plan.step.predicted_seconds, rel=0.06)
    assert main(["explain", str(out)]) == 0
    explained, page = " ".join(capsys.readouterr().out.split()), html.unescape((out / "report.html").read_text())
    assert [message[:4] for message in plan.search.step_messages[:2]] == ["gap ", "the "]
    assert all(message in explained and message[1:] in page for message in plan.search.step_messages)
    assert "costs have changed" not in explained
    assert len(plan.search.steps) == 1 + len(summary["searched_step"]["others"])
    assert all(" ".join(step_cells(step)[-2:]) in explained for step in plan.search.steps)


@pytest.mark.slow
def test_the_package_is_of_the_graph_at_the_batch_of_its_micro_batch(tmp_path: Path) -> None:
    """Captured with 4 samples, planned with 1 on each of two replicas: the one command ends with a package that
    computes what the original does of two samples, and names the command that makes it again."""
    out, sizes = tmp_path / "out", ["n_layer=2", "n_embd=32", "n_head=2", "sequence=8", "vocabulary=20"]
    argv = ["plan", str(GPT2), "--with", *sizes, "--devices", "2", "--global-batch", "8", "--stages", "1"]
    argv += ["--micro-batch", "1", "--zero", "3", "--hardware", "a100-80g-sxm", "--out", str(out)]
    assert main(argv) == 0
    plan = load(out / "plan.json")
    assert plan.step.samples == 2 and plan.step.micro_batches == 4
    options = "--devices 2 --hardware a100-80g-sxm --precision fp32 --optimizer adamw --global-batch 8 --stages 1 "
    assert options + "--recompute none --micro-batch 1 --zero 3" in command(plan)
    proof = verify_package(out, backend="lockstep")
    assert proof.passed and not proof.reduced, proof.failure


@pytest.mark.slow
def test_the_command_takes_the_least_memory_of_whole_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "gpt2.graph.json"
    saved.write_text(dumps(gpt2()), encoding="utf-8")
    argv = ["plan", str(saved), "--precision", "bf16-mixed", "--devices", "2", "--global-batch", "8", "--stages", "1"]
    argv += ["--hardware", "a100-80g-sxm", "--micro-batch", "2", "--zero", "0,3"]
    plans = {}
    for level in ("memory", "speed"):
        assert main([*argv, "--level", level, "--out", str(tmp_path / level)]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert ("the fullest device holds" in printed) == (level == "memory")
        plans[level] = load(tmp_path / level / "plan.json")
    assert plans["memory"].search.level == 1
    assert plans["memory"].step.predicted_peak_bytes < plans["speed"].step.predicted_peak_bytes
    assert plans["memory"].certificate.level_objective == plans["memory"].step.predicted_peak_bytes


def test_a_model_that_joins_its_batch_with_something_is_refused_with_a_mesh_to_type() -> None:
    graph = capture(f"{__file__}:mixed", {}, "fp32")
    with pytest.raises(UsageError, match="size of the batch, which can't change alone") as raised:
        searched_step(graph, hardware(), SearchRequest(devices=4, step=StepRequest(global_batch=20)))
    assert raised.value.hint.startswith("--mesh dp=2,tp=2 --global-batch 18, without --devices")


class Mixed(nn.Module):
    """Reads its samples as one row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6 * 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(1, -1)).square().mean()


def mixed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Mixed(), (torch.randn(6, 8),)


class Placed(nn.Module):
    """A table of positions is an input of its own, without a batch: 8 rows, and a micro-batch may have 8 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + table
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def placed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Placed(), (torch.randn(4, 8, 16), torch.randn(8, 16))


def test_an_input_as_long_as_the_searched_batch_is_no_batch() -> None:
    graph = capture(f"{__file__}:placed", {})
    step = StepRequest(global_batch=16, stages=1, micro_batch=4, recompute="none")
    joint = searched_step(graph, hardware(), SearchRequest(devices=2, step=step))
    wide = next(candidate for candidate in (joint.best, *joint.others) if candidate.problem.choice.replicas == 2)
    step_graph, plan = joint_plan(replace(joint, best=wide), hardware(), Origin(""))
    assert step_graph.tensor(step_graph.inputs[0]).shape[0] == step_graph.tensor(step_graph.inputs[1]).shape[0] == 8
    layouts = {value.name: str(value.layout) for value in plan.inputs}
    assert layouts == {"x": "S0 R", "table": "R R"}


class Woven(nn.Module):
    """Layers that share a module: all of them a product, or two a norm that updates its buffers."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(9))
        self.shared = nn.BatchNorm1d(16) if norm else nn.Linear(16, 16)
        self.readers = (3, 6) if norm else range(9)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            x = self.shared(x).tanh() if number in self.readers else x
        return x.square().mean()


def woven(norm: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Woven(norm), (torch.randn(4, 16),)


def answer(norm: bool, **options: Any) -> StepAnswer:
    model = verbs.capture(f"{__file__}:woven", arguments={"norm": norm}, precision="bf16-mixed")
    step = StepRequest(**({"global_batch": 8, "micro_batch": 4, "recompute": "none"} | options))
    return planned_step(model, hardware(), SearchRequest(devices=2, step=step))


def test_a_weight_of_all_layers_leaves_one_part_to_a_stage() -> None:
    """Nobody asked for several, each of which would train it."""
    joint = answer(False, stages=2).result
    assert joint.best.problem.choice.virtual_stages == 1
    assert any("would train shared.weight" in reason for reason, _ in joint.undivided)


def test_a_step_that_no_plan_can_be_made_of_gives_way_to_fewer_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    first = searched_step

    def staged(graph: Graph, machine: Hardware, wanted: SearchRequest, *args: Any) -> JointResult:
        """As where two stages are the best."""
        step = wanted.step if wanted.step.stages is not None else replace(wanted.step, stages=2)
        return first(graph, machine, replace(wanted, step=step), *args)

    with pytest.raises(UsageError, match="changes in part 0 of the pipeline"):
        answer(True, stages=2, virtual_stages=1)
    monkeypatch.setattr("autoshard.api.step_answer.searched_step", staged)
    joint = answer(True).result
    assert joint.best.problem.choice.stages == 1
    assert "changes in part 0 of the pipeline" in joint.undivided[0][0]


def found_with(blocks: float, program: float, size: float = 0.0) -> Any:
    return SimpleNamespace(seconds=blocks, program_seconds=program, program_bytes=size)


def test_programs_are_compared_with_programs_and_none_is_slower_by_less_than_nothing() -> None:
    best = found_with(1.0, 0.98)
    assert why_not(best, best) == "chosen"
    assert why_not(found_with(0.99, 1.078), best) == "10.0% slower"
    assert why_not(found_with(1.1, 0.0), best) == "10.0% slower (estimated)"
    assert why_not(found_with(0.95, 0.0), best) == "not simulated"
    assert why_not(found_with(0.95, 0.97, 11.0), best, room_bytes=10.0) == "too large"


@pytest.mark.parametrize(
    "fixed",
    [
        {"stages": (2,), "tensor": (2,), "zero": (0,)},
        pytest.param({"stages": (1,), "tensor": (4,)}, marks=pytest.mark.slow),
        pytest.param({"stages": (2,), "tensor": (1,), "zero": (0,), "keeps": ("input",)}, marks=pytest.mark.slow),
        {"stages": (1,), "tensor": (1,), "zero": (3,), "keeps": ("all",)},
        pytest.param({"stages": (1,), "tensor": (1,), "zero": (3,), "keeps": ("expensive",)}, marks=pytest.mark.slow),
        {"stages": (2,), "tensor": (1,), "zero": (3,), "keeps": ("all",)},
        pytest.param({"stages": (1,), "tensor": (1,), "zero": (1,), "keeps": ("input",)}, marks=pytest.mark.slow),
        pytest.param({"stages": (2,), "tensor": (1,), "zero": (2,), "keeps": ("all",)}, marks=pytest.mark.slow),
        pytest.param({"stages": (1,), "tensor": (2,), "zero": (2,), "keeps": ("all",)}, marks=pytest.mark.slow),
        pytest.param({"stages": (1,), "tensor": (2,), "zero": (1,), "keeps": ("all",)}, marks=pytest.mark.slow),
        pytest.param({"stages": (1,), "tensor": (2,), "zero": (3,), "keeps": ("all",)}, marks=pytest.mark.slow),
    ],
)
def test_costs_of_blocks_are_those_of_the_plan_made_of_them(fixed: dict[str, Any]) -> None:
    """Three layers measured once each against the whole program on all axes; weights whole or in shards."""
    joint = joint_search(wide(), hardware(), space(wide(), 4, 16, micro_batch=(2,), virtual_stages=(1,), **fixed), 8e10)
    _, plan = joint_plan(joint, hardware(), Origin("gpt2"))
    assert step_seconds(plan) == pytest.approx(joint.best.seconds, rel=0.04)
    assert (
        plan.step.predicted_peak_bytes <= 1.03 * joint.best.peak_bytes
    )  # a block's most is taken beside all that is kept
    assert plan.step.predicted_peak_bytes == pytest.approx(joint.best.peak_bytes, rel=0.2)


def test_a_split_of_one_sample_is_the_same_on_the_mesh_of_all_replicas() -> None:
    """Of one sample a rule leaves a letter out, so that `b` is another dim than of two: no collective more a block."""
    fixed = {"micro_batch": (1,), "stages": (1,), "virtual_stages": (1,), "tensor": (2,), "zero": (0,)}
    joint = joint_search(wide(), hardware(), space(wide(), 4, 16, **fixed), 8e10)
    graph, plan = joint_plan(joint, hardware(), Origin("gpt2"))
    assert step_seconds(plan) == pytest.approx(joint.best.seconds, rel=0.04)
    moved = [r for r in plan.redistributions if "tp" in {axis for step in r.steps for axis in step.axes}]
    inside = [graph.producers[r.tensor].module for r in moved if r.tensor in graph.producers]
    counts = [len([module for module in inside if module.startswith(f"transformer.h.{n}.")]) for n in (1, 2)]
    assert counts[0] == counts[1] <= 8


@cache
def wide() -> Graph:
    sizes = {"batch": 4, "sequence": 1024, "n_layer": 4, "n_embd": 2048, "n_head": 16, "vocabulary": 8000}
    return capture(str(GPT2), sizes, "bf16-mixed")


def test_what_a_searched_step_does_not_have_is_said() -> None:
    step = StepRequest(global_batch=16)
    for wanted, option in (
        (SearchRequest(devices=4, step=step, strategy="hsdp"), "--strategy hsdp"),
        (SearchRequest(devices=4, step=step, solver="dp"), "--solver"),
    ):
        with pytest.raises(UsageError, match=f"{option}.* is not offered"):
            searched_step(gpt2(), hardware(), wanted)
