"""Unequal shares of the batch: the model's own numbers, who may take them, and what they are predicted to take."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.constraints.step_request import StepRequest
from autoshard.emit import emit
from autoshard.errors import UsageError
from autoshard.ir import plan_json
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan, StepPlan
from autoshard.program.lower import lower
from autoshard.program.step_check import dealt, share_words
from autoshard.replay.resize import reapply
from autoshard.search.build_plan import Origin
from autoshard.search.fixed_step import best_shares, predicted
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification.case import check_files, make_case
from autoshard.whole_step_search.joint_plan import joint_plan
from autoshard.whole_step_search.joint_search import joint_search
from autoshard.workflow import make_plan
from tests.captured import captured
from tests.single.test_joint_search import space
from tests.slow import slow

TWO = load_hardware("a100-80g-sxm:2,v100-32g-sxm2:2")
GPT2 = "examples/gpt2.py:build"
SMALL = {"batch": 4, "sequence": 8, "n_layer": 2, "n_embd": 48, "n_head": 6, "vocabulary": 97}


def shared(spec: str, mesh: str, shares: tuple[int, ...], style: str = "dp", zero: int = 1, **sizes: int) -> Plan:
    graph = captured(spec, sizes)
    plan = search(graph, load_hardware("a100-80g-sxm"), SearchRequest(Mesh.parse(mesh), strategy=style))
    count = sum(shares) // Mesh.parse(mesh).sizes[0]
    return replace(plan, model=spec, step=StepPlan(count, zero=zero, batch_shares=shares))


@pytest.mark.parametrize(
    ("spec", "mesh", "shares", "style", "sizes"),
    [
        (GPT2, "dp=2", (3, 1), "dp", SMALL),  # dropout, ignored labels
        slow(GPT2, "dp=2,tp=2", (5, 3), "megatron", SMALL),
        slow("tests/small_models.py:weighted", "dp=3", (1, 5, 3), "dp", {}),  # class weights
        slow("tests.models.decoders:llama", "dp=2,tp=2", (1, 5), "megatron", {}),
        slow("tests.models.decoders:mixtral", "dp=2,tp=2", (5, 1), "megatron", {}),
        slow("tests.models.pairs:t5", "dp=2,tp=2", (5, 1), "dp", {}),  # masks are cut as the batch is
        slow("tests.models.encoders:xlnet", "dp=2,tp=2", (5, 1), "dp", {}),
        slow("tests.models.vision:vit", "dp=2,tp=2", (5, 1), "dp", {}),
    ],
)
def test_a_step_is_the_models_own_whatever_the_shares(
    spec: str, mesh: str, shares: tuple[int, ...], style: str, sizes: dict[str, int]
) -> None:
    plan = shared(spec, mesh, shares, style, **sizes)
    graph = captured(spec, sizes)
    program = lower(plan, graph)
    case = make_case(spec, sizes, graph, steps=2, micro_batches=plan.step.micro_batches)
    proof = check_files(case, program, emit(program, plan, graph))
    checked = {kind.kind: kind.count for kind in proof.kinds}
    assert proof.passed and checked["output"] and checked["evaluation"] == plan.mesh.size


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("mean = total.to(torch.float64) / micro_batches if sliced else amounts.mean()", "mean = amounts.mean()"),
        slow("if axis.mesh.slice_at is None or axis.name != axis.mesh.slice_at[0]:", "if True:"),
        slow("at, slices = mesh.coordinates | {self.axis: coordinate}, []", "at, slices = mesh.coordinates, []"),
        (
            "losses[piece.number] = losses[piece.number] + outputs[0].detach()",
            "losses[piece.number] = outputs[0].detach()",
        ),
        slow("self.coordinates = coordinates | {at[0]: at[1]}", "pass"),
    ],
)
def test_planted_faults_of_the_runtime_are_seen(line: str, wrong: str) -> None:
    plan, graph = shared(GPT2, "dp=2", (3, 1), **SMALL), captured(GPT2, SMALL)
    program = lower(plan, graph)
    files = emit(program, plan, graph)
    name = next(name for name, text in files.items() if line in text)
    case = make_case(GPT2, SMALL, graph, steps=1, micro_batches=2)
    planted = {**files, name: files[name].replace(line, wrong)}
    assert not check_files(case, program, planted).passed


def norm() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).square().mean()

    return Loss(), (torch.randn(8, 4),)


class Contrast(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y @ y.T).square().mean()


def contrast() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Contrast(), (torch.randn(8, 4),)


HERE = f"{__file__}:"


@pytest.mark.parametrize(
    ("spec", "mesh", "shares", "style", "zero", "why"),
    [
        (GPT2, "dp=2", (3, 1), "fsdp", 3, "--zero 1 alone waits"),
        (GPT2, "dp=2", (3, 1), "fsdp", 2, "--zero 1 alone waits"),
        (GPT2, "tp=2", (3, 1), "megatron", 1, "the batch is not split over it"),
        slow(GPT2, "dp=2", (4, 0), "dp", 1, "1 or more, 4 in all"),
        slow(GPT2, "dp=4", (5, 1, 2), "dp", 1, "one for each of the 4 coordinates"),
        slow(GPT2, "dp=2", (1, 1), "dp", 1, "one micro-batch"),
        (f"{HERE}norm", "dp=2", (3, 1), "dp", 1, "updates buffers"),
        (f"{HERE}contrast", "dp=2", (3, 1), "dp", 1, "within a micro-batch"),
    ],
)
def test_who_can_not_take_unequal_shares(
    spec: str, mesh: str, shares: tuple[int, ...], style: str, zero: int, why: str
) -> None:
    sizes = SMALL if spec == GPT2 else {}
    with pytest.raises(UsageError, match=why):
        lower(shared(spec, mesh, shares, style, zero, **sizes), captured(spec, sizes))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=3), st.integers(0, 6))
def test_shares_are_the_best_of_all(seconds: list[float], more: int) -> None:
    slices = len(seconds) + more
    counts = dealt(seconds, slices)
    every = itertools.product(range(1, slices + 1), repeat=len(seconds))
    least = min(max(map(float.__mul__, map(float, shares), seconds)) for shares in every if sum(shares) == slices)
    assert sum(counts) == slices and min(counts) >= 1
    assert max(map(float.__mul__, map(float, counts), seconds)) == pytest.approx(least)


def large() -> Graph:
    sizes = {"batch": 4, "sequence": 512, "n_layer": 4, "n_embd": 1024, "n_head": 8, "vocabulary": 1000}
    return captured(GPT2, sizes, "fp16-mixed")


def planned(shares: str | None, mesh: str = "dp=2,tp=2", count: int = 6, style: str = "megatron") -> Plan:
    step = StepRequest(micro_batches=count, batch_shares=shares)
    return make_plan(large(), TWO, SearchRequest(Mesh.parse(mesh), strategy=style, step=step)).plan


@pytest.mark.slow
def test_the_shares_of_two_kinds_are_those_with_the_shortest_step() -> None:
    """Of all that there are, as each is predicted; what says so can be typed."""
    plan, equal = planned(None), planned("equal")
    every = {}
    for first in range(1, 12):
        candidate = replace(equal, step=replace(equal.step, batch_shares=(first, 12 - first)))
        every[first, 12 - first] = predicted(candidate, large()).step_seconds
    assert plan.step.batch_shares == min(every, key=lambda shares: every[shares]) != (6, 6)
    assert plan.step_seconds == min(every.values()) < 0.9 * equal.step_seconds
    assert plan.step.batch_shares == best_shares(equal, large(), TWO)
    first, second = plan.step.batch_shares
    note = f"of 12 slices a step (2 of each micro-batch) ranks 0 to 1 compute {first} each, "
    note += f"ranks 2 to 3 compute {second} each"
    assert share_words(plan.step, plan.mesh) == note and any(note in line for line in plan.search.notes)
    assert planned(f"{first},{second}").step == plan.step
    assert plan_json.plan_hash(plan, large()) != plan_json.plan_hash(equal, large())
    assert plan_json.loads(plan_json.dumps(plan)) == plan


def test_shares_stand_for_each_coordinate_or_each_kind_and_follow_a_shorter_mesh() -> None:
    plan = planned("4,2", "dp=4", 3, "dp")
    assert plan.step.batch_shares == planned("4,4,2,2", "dp=4", 3, "dp").step.batch_shares == (4, 4, 2, 2)
    shorter = reapply(plan, large(), large(), TWO, Mesh.parse("dp=2"))
    assert shorter.step.batch_shares == (4, 2)


def test_devices_of_one_kind_take_equal_shares() -> None:
    step = StepRequest(micro_batches=6, batch_shares="auto")
    request = SearchRequest(Mesh.parse("dp=2,tp=2"), strategy="megatron", step=step)
    assert make_plan(large(), load_hardware("a100-80g-sxm"), request).plan.step.batch_shares == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--mesh dp=4 --micro-batches 4 --batch-shares much", "expected auto, equal, or numbers"),
        slow(
            "--mesh dp=4 --micro-batches 4 --batch-shares 5,2", "one for each of the 4 coordinates of dp, 1 or more, 16"
        ),
        slow("--mesh dp=4 --batch-shares 1,1,1,1", "one micro-batch"),
        ("--devices 4 --global-batch 16 --batch-shares 3,1", "not offered where a whole step is searched for"),
    ],
)
def test_options_that_can_not_be(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "tests/transformer_models.py:gpt2", *options.split(), "--hardware", TWO.name]
    assert main(command) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_searched_step_takes_unequal_shares_where_they_pay() -> None:
    """Its bound holds for all shares; equal ones are asked for."""
    ways = space(large(), 4, 64, zero=(0, 1), micro_batch=(2,), stages=(1,))
    result, equal = (
        joint_search(large(), TWO, replace(ways, equal_shares=flag), TWO.usable_memory_bytes) for flag in (False, True)
    )
    assert result.best.problem.by_replica and not equal.best.problem.by_replica
    assert result.bound <= result.best.seconds < 0.9 * equal.best.seconds
    _, plan = joint_plan(result, TWO, Origin(model=GPT2))
    assert len(set(plan.step.batch_shares)) == 2
    assert plan.step_seconds == pytest.approx(result.best.seconds, rel=0.1)
    for candidate in (result.best, *result.others):
        problem = candidate.problem
        counts = itertools.product(range(1, 8), repeat=len(problem.by_replica)) if problem.by_replica else ()
        every = [one for one in counts if sum(one) == problem.choice.micro_batches * len(problem.by_replica)]
        for one in every:
            costs = [kind.step_costs(candidate.plan).parts[0] for kind in problem.by_replica]
            took = max(n * (c.forward_seconds + c.backward_seconds) for n, c in zip(one, costs, strict=True))
            assert took >= problem.choice.micro_batches * sum(
                float(problem.fronts[kind].front.seconds[point])
                for kind, point in zip(problem.kinds, candidate.plan.points, strict=True)
            ) * (1 - 1e-9)
