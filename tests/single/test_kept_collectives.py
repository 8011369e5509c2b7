"""Blocks that backward computes again without their collectives: what these gave is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoshard
from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.emit.runtime import ParallelMesh, all_gather, recomputed
from autoshard.emit.runtime.axis import GroupTransport
from autoshard.emit.runtime.kept_collectives import KeptResults, reused_result
from autoshard.errors import UsageError
from autoshard.graph_capture.capture import capture, capture_model
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import PLAIN, BlockPolicy, Plan, StepPlan
from autoshard.ir.plan_json import load
from autoshard.ir.program import Collective, Program
from autoshard.program.lower import lower
from autoshard.program.weights import weight_ways
from autoshard.redistribute import LOCAL
from autoshard.replay.command_line import command
from autoshard.search.build_plan import Origin
from autoshard.search.fixed_step import repeated_blocks, with_step
from autoshard.search.search_request import SearchRequest
from autoshard.simulation.step_timeline import PartCosts
from autoshard.simulation.steps.program_step import MeasuredProgram
from autoshard.verification.case import Case, case_of, check_files, make_case, written
from autoshard.verification.ranks.loaded_package import load_package
from autoshard.verification.ranks.lockstep import ThreadTransport, run_lockstep
from autoshard.whole_step_search.joint_plan import joint_plan, step_seconds
from autoshard.whole_step_search.joint_search import joint_search
from autoshard.whole_step_search.step_request_space import searched_step
from autoshard.workflow import make_plan
from tests.forced import forced_plan, sharded_plan
from tests.meter import Meter
from tests.single.test_joint_search import hardware as a100
from tests.single.test_joint_search import space
from tests.single.test_joint_search import wide as wide_gpt2
from tests.single.test_recompute import SPEC as GPT2
from tests.slow import quick_at, slow

LLAMA = f"{Path(__file__).parents[1] / 'models' / 'decoders.py'}:llama"
SPECS = {"gpt2": (GPT2, {}), "undropped": (GPT2, {"dropout": 0.0}), "llama": (LLAMA, {})}
BOTH = tuple(PLAIN)


@cache
def graph_of(name: str) -> Graph:
    return capture(*SPECS[name])


@cache
def case_of_name(name: str) -> Case:
    spec, sizes = SPECS[name]
    return make_case(spec, sizes, graph_of(name), steps=2, micro_batches=2)


@cache
def plan_of_name(name: str, kind: str) -> Plan:
    graph = graph_of(name)
    if kind == "zero":
        return sharded_plan(graph, Mesh.parse("dp=2"), "dp")
    if kind.startswith("random"):
        return forced_plan(graph, Mesh.parse("dp=2,tp=2"), lambda *_: True, int(kind[-1]))
    return make_plan(graph, load_hardware("cpu-local"), SearchRequest(Mesh.parse("tp=2"), strategy=kind)).plan


def kept_as(name: str, kind: str, keep: str, count: int = 2) -> tuple[Plan, Program]:
    graph = graph_of(name)
    step = StepPlan(count, recompute=tuple(BlockPolicy(path, keep) for path in repeated_blocks(graph)))
    plan = replace(plan_of_name(name, kind), step=step)
    return plan, lower(plan, graph)


def kept(program: Program) -> list[Collective]:
    return [step for step in program.instructions if isinstance(step, Collective) and step.reused]


# --- the fault that a list of operators has ---


@pytest.fixture
def alone() -> Iterator[ParallelMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ParallelMesh({"tp": 1}, 0, lambda *_: GroupTransport(None), torch.device("cpu"))
    dist.destroy_process_group()


def test_a_list_of_operators_would_lose_what_a_collective_gave(
    alone: ParallelMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are wrong without a word, those by `kept=True` right, with the collective run once."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ran, axis = Counter[str](), alone["tp"]
    before = axis.transport.start_all_gather

    def gather(*arguments: Any) -> Any:
        ran["collectives"] += 1
        return before(*arguments)

    monkeypatch.setattr(axis.transport, "start_all_gather", gather)

    class Block(nn.Module):
        def __init__(self, kept: bool) -> None:
            super().__init__()
            self.kept = kept

        def forward(self, value: Tensor) -> Tensor:
            ran["calls"] += 1
            return all_gather(value.sin(), axis, 0, kept=self.kept).square().sum()

    def listed(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op.namespace == "c10d" else CheckpointPolicy.PREFER_RECOMPUTE

    def gradient(result: Tensor) -> Tensor:
        return torch.autograd.grad(result, x)[0]

    right = gradient(Block(kept=False)(x))
    assert torch.allclose(right, (2 * x).sin())
    contexts = partial(create_selective_checkpoint_contexts, listed)
    silent = gradient(checkpoint(Block(kept=False), x, use_reentrant=False, context_fn=contexts))
    assert not torch.allclose(silent, right)
    for keep in ("input", "expensive"):
        for flag, times in ((False, 2), (True, 1)):
            ran.clear()
            assert torch.equal(gradient(recomputed(Block(flag), alone.random, x, keep=keep)), right)
            assert ran == {"calls": 2, "collectives": times}


# --- what is kept, for how long ---


def test_results_are_found_in_order_and_once() -> None:
    results, calls = KeptResults(), list[int]()

    def make(x: Tensor) -> Tensor:
        calls.append(int(x))
        return x + 1

    def forward(*values: int) -> list[int]:
        with results:
            return [int(reused_result(make, torch.tensor(value))) for value in values]

    assert forward(1, 2) == [2, 3] and calls == [1, 2]
    assert forward(10) == [2] and forward(1, 20) == [2, 3]  # a second stops early; a third makes again what was found
    assert calls == [1, 2, 1] and int(reused_result(make, torch.tensor(5))) == 6
    assert all(value is None for value in results.saved)


def test_what_was_written_over_is_told() -> None:
    results = KeptResults()
    with results:
        reused_result(torch.sin, torch.ones(2)).add_(1)
    with pytest.raises(RuntimeError, match="written over"), results:
        reused_result(torch.sin, torch.ones(2))


def test_nothing_is_kept_where_no_backward_follows() -> None:
    results = KeptResults()
    with torch.no_grad(), results:
        reused_result(torch.sin, torch.ones(2))
    assert not results.saved


# --- the same numbers, without a second collective ---


@pytest.mark.parametrize(
    ("name", "kind", "keep"),
    [
        slow("gpt2", "megatron", "communicated"), slow("gpt2", "megatron", "expensive+communicated"),
        slow("gpt2", "zero", "communicated"), slow("gpt2", "random0", "communicated"),
        slow("llama", "megatron-sp", "communicated"), ("llama", "random1", "expensive+communicated"),
        slow("llama", "random2", "communicated"), slow("llama", "random3", "communicated"),
    ],
)  # fmt: skip
def test_the_step_is_that_of_the_original(name: str, kind: str, keep: str) -> None:
    """In float64, with dropout, over several micro-batches."""
    plan, program = kept_as(name, kind, keep)
    assert bool(kept(program)) == (kind != "zero")
    proof = check_files(case_of_name(name), program, emit(program, plan, graph_of(name)))
    assert proof.passed, proof.failure


def collectives_of(name: str, kind: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], int]:
    """What every device starts in the backward of a step, by what it does; and bytes that wait for it on each."""
    plan, program = kept_as(name, kind, keep, count=1)
    with written(emit(program, plan, graph_of(name))) as folder:
        package = load_package(Path(folder))
    counts, state = Counter[str](), {"phase": "forward"}

    def counting(method: str) -> Callable[..., Any]:
        before = getattr(ThreadTransport, method)

        def run(self: ThreadTransport, *arguments: Any) -> Any:
            counts[method] += state["phase"] == "backward"
            return before(self, *arguments)

        return run

    for method in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):  # what starts one calls these
        monkeypatch.setattr(ThreadTransport, method, counting(method))

    def run(mesh: Any) -> int:
        model = package.model.build_model(mesh)
        package.runtime.init_parameters(model, 0)
        ids = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(0))
        with Meter([*model.parameters(), *model.buffers(), ids]) as meter:
            before = sum(size for _, size in meter.alive.values())
            output = model(ids, ids)
            waiting = sum(size for _, size in meter.alive.values()) - before
        mesh["tp"].transport.barrier()
        state["phase"] = "backward"
        (output[0] if isinstance(output, tuple) else output).backward()
        return waiting

    waiting = int(run_lockstep(dict(plan.mesh.axes), run, mesh_type=package.runtime.ParallelMesh)[0])
    monkeypatch.undo()
    return counts, waiting


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "each"),
    [("gpt2", "megatron", 2), ("undropped", "megatron", 1), ("llama", "megatron", 1), ("llama", "megatron-sp", 3)],
)
def test_no_collective_runs_a_second_time(name: str, kind: str, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the written package; and what it keeps for that is the results, to the byte."""
    by_keep = {
        keep: collectives_of(name, kind, keep, monkeypatch)
        for keep in ("all", "input", "communicated", "expensive", "expensive+communicated")
    }
    counts = {keep: counter for keep, (counter, _) in by_keep.items()}
    assert counts["communicated"] == counts["expensive+communicated"] == counts["all"]
    assert counts["input"] == counts["expensive"] != counts["all"]
    _, program = kept_as(name, kind, "communicated", count=1)
    devices = program.mesh.size
    steps = kept(program)
    assert sum(counts["input"].values()) - sum(counts["all"].values()) == devices * len(steps)
    layers = len(repeated_blocks(graph_of(name)))
    assert len(steps) == layers * each  # the last of a block runs again only for the mask of the dropout behind it
    size = sum(program.largest[step.result].bytes for step in steps)
    for both, plain in PLAIN.items():
        assert by_keep[both][1] - by_keep[plain][1] == size


@pytest.mark.slow
def test_weights_and_what_does_not_run_again_are_not_kept() -> None:
    graph = graph_of("undropped")
    for kind in ("zero", "random0", "random1", "random2"):
        plan, program = kept_as("undropped", kind, "communicated")
        steps, ways = kept(program), program.once(weight_ways)
        assert all(step.operand not in ways and step.forward not in ("", *LOCAL) for step in steps)
        assert not kept(kept_as("undropped", kind, "input")[1])
        text = "".join(emit(program, plan, graph).values())
        assert bool(steps) == ("kept=True)" in text) == (kind != "zero")


# --- what is predicted ---


def measured(name: str, keep: str) -> tuple[PartCosts, Program]:
    graph = graph_of(name)
    plan, program = kept_as(name, "megatron", keep)
    return MeasuredProgram(plan, program, graph, load_hardware("cpu-local"), 1).keeping(plan.step.recompute)[
        0
    ].costs, program


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("both", BOTH)
def test_bytes_are_charged_and_seconds_are_not(name: str, both: str) -> None:
    """The simulated step keeps the results, and its backward is shorter by the collectives' forward."""
    (kept_costs, program), (plain_costs, _) = measured(name, both), measured(name, PLAIN[both])
    steps = kept(program)
    size = sum(program.largest[step.result].bytes for step in steps)
    assert kept_costs.saved_bytes - plain_costs.saved_bytes == size > 0
    everything, _ = measured(name, "all")
    assert everything.backward_seconds < kept_costs.backward_seconds < plain_costs.backward_seconds
    assert kept_costs.forward_seconds == plain_costs.forward_seconds


@pytest.mark.slow
def test_a_search_offers_it_where_it_is_asked_for() -> None:
    """The program of what is found takes what its blocks said, and holds it."""
    graph = wide_gpt2()
    ways = space(graph, 2, 8, stages=(1,), tensor=(2,), micro_batch=(1,), zero=(0,), keeps=("input",))
    plain = joint_search(graph, a100(), ways, 8e10)
    for both in BOTH:
        result = joint_search(graph, a100(), replace(ways, keeps=(both,)), 8e10)
        _, plan = joint_plan(result, a100(), Origin("gpt2"))
        assert {policy.keep for policy in plan.step.recompute} == {both}
        assert step_seconds(plan) == pytest.approx(result.best.seconds, rel=0.04)
        assert plan.step.predicted_peak_bytes == pytest.approx(result.best.peak_bytes, rel=0.02)
        assert result.best.seconds < plain.best.seconds and result.best.peak_bytes > plain.best.peak_bytes
    alone = space(graph, 1, 8, stages=(1,), tensor=(1,), micro_batch=(4,), zero=(0,), keeps=("input", *BOTH))
    problem = joint_search(graph, a100(), alone, 8e10).best.problem
    assert ("input", "expensive+communicated") in problem.keeps  # nothing is communicated: one of two equal ones


# --- how it is asked for ---


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", GPT2, "--mesh", "tp=2", "--hardware", "cpu-local", "--strategy", "megatron", "--recompute"]
    for word, line in (("communicated", "recomputed("), ("selective+communicated", 'keep="expensive")')):
        assert main([*argv, word, "--out", str(tmp_path / word)]) == 0
        plan = load(tmp_path / word / "plan.json")
        assert f"--recompute {word}" in command(plan)
        text = (tmp_path / word / "model_parallel.py").read_text(encoding="utf-8")
        assert line in text and "# kept: what its collectives gave" in text and "kept=True)" in text
    assert "all but collectives" in (tmp_path / "communicated" / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    with pytest.raises(UsageError, match="unknown recomputation 'communicate'"):
        StepRequest(recompute="communicate").check()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()).sin()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def asked(path: str, equal: bool = False) -> Tower:
    tower = Tower()
    for block in [tower.get_submodule(path)] if not equal else list(tower.blocks):
        autoshard.recompute(block, mp_comm_recompute=False)
    return tower


@pytest.mark.parametrize("path", quick_at(["blocks", "blocks.1", "blocks.2.down"], 2))
def test_a_module_asks_for_it(path: str) -> None:
    """The whole list, a block, a single layer."""
    graph = capture_model(asked(path), (torch.randn(6, 8),))
    plan = forced_plan(graph, Mesh.parse("tp=2"), lambda *_: True)
    plan = with_step(plan, graph, StepRequest(micro_batches=2))
    assert {*plan.step.keeps.values()} == {"communicated"}
    program = lower(plan, graph)
    proof = check_files(case_of(asked(path), (torch.randn(6, 8),), graph, steps=2, micro_batches=2), program,
                        emit(program, plan, graph))  # fmt: skip
    assert proof.passed, proof.failure


def test_a_search_of_whole_steps_follows_it() -> None:
    graph = capture_model(asked("blocks", equal=True), (torch.randn(6, 8),))
    wanted = SearchRequest(devices=2, step=StepRequest(global_batch=12, micro_batch=3, stages=1))
    best = searched_step(graph, load_hardware("a100-80g-sxm"), wanted).best
    kinds = {best.problem.keeps[kind] for kind in best.problem.kinds}
    assert ("communicated",) in kinds
    mixed = asked("blocks.1")
    autoshard.recompute(mixed.blocks[0])
    autoshard.recompute(mixed.blocks[2])
    with pytest.raises(UsageError, match=r"of some blocks, and not so of blocks\.1, which is equal"):
        searched_step(capture_model(mixed, (torch.randn(6, 8),)), load_hardware("a100-80g-sxm"), wanted)
