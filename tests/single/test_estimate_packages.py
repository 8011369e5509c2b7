"""A GPT described by numbers (`estimate --software autoshard`) and the same GPT captured and planned: seconds and bytes
of whole steps, over tensor and data parallelism, ZeRO, recomputation, micro-batches and stages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.constraints.step_request import StagePin, StepRequest
from autoshard.errors import UsageError
from autoshard.estimate.optimizer_step import stage_parameters
from autoshard.estimate.packages import package_program
from autoshard.estimate.packages.package_estimate import estimate_any as estimate
from autoshard.estimate.packages.package_program import package_costs
from autoshard.estimate.packages.package_runs import package_runs
from autoshard.estimate.packages.package_step import layers_of_parts
from autoshard.estimate.run_space import RunSpace
from autoshard.estimate.stage_memory import stage_memory
from autoshard.estimate.step import Estimate
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_program import build
from autoshard.graph_capture.capture import capture, capture_model
from autoshard.ir.graph import Graph
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BlockPolicy, Plan
from autoshard.program.lower import lower
from autoshard.program.schedules.pipeline_schedule import in_flight
from autoshard.search.build_plan import Origin
from autoshard.search.fixed_step import predicted, with_step
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.simulation.step_timeline import simulate_step
from autoshard.simulation.steps.program_step import measured_parts
from autoshard.whole_step_search.blocks.block_line import block_line
from autoshard.whole_step_search.config_space import ConfigSpace
from autoshard.whole_step_search.joint_plan import confirmed
from autoshard.whole_step_search.joint_search import joint_search
from autoshard.whole_step_search.optimizer_shards import ZeroRequest, with_shards
from tests.slow import quick_at, slow

A100, H100 = load_hardware("a100-80g-sxm"), load_hardware("h100-80g-sxm")
LAYERS, HIDDEN, HEADS, SEQUENCE, MICRO_BATCH = 6, 1024, 16, 512, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        parts = self.qkv(self.norm1(x)).split(HIDDEN, dim=2)
        query, key, value = (part.view(batch, sequence, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.out(mixed.transpose(1, 2).reshape(batch, sequence, HIDDEN)) + x
        return self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")) + x


class GPT(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(words, HIDDEN), nn.Parameter(torch.zeros(SEQUENCE, HIDDEN))
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


@cache
def captured(batch: int, words: int, precision: str) -> Graph:
    tokens = torch.randint(0, words, (batch, SEQUENCE))
    return capture_model(GPT(words), (tokens, tokens), precision)  # type: ignore[arg-type]


def hardware_for(precision: str) -> Hardware:
    return H100 if precision == "fp8-mixed" else A100


@cache
def split(dp: int, tp: int, words: int, precision: str, count: int, zero: int, cut: bool) -> Plan:
    """Of Megatron-LM's strategies."""
    style = "megatron-sp" if cut else "megatron"
    graph, step = captured(MICRO_BATCH * dp, words, precision), StepRequest(micro_batches=count)
    request = SearchRequest(Mesh((("dp", dp), ("tp", tp))), strategy=style, step=step)
    hardware = hardware_for(precision)
    plan = search(graph, hardware, request)
    return with_shards(with_step(plan, graph, step), graph, hardware, ZeroRequest(zero, summed=True)) if zero else plan


def planned(run: TrainingRun, words: int) -> tuple[float, float]:
    """Seconds and bytes of the captured model's plan."""
    graph, each = captured(MICRO_BATCH * run.dp, words, run.precision), LAYERS // run.pp
    plan = split(run.dp, run.tp, words, run.precision, run.micro_batches, run.zero, run.sequence_parallel)
    pins = tuple(StagePin(f"layers.{n}", n // each) for n in range(LAYERS)) if run.pp > 1 else ()
    stages = run.pp if run.pp > 1 else None
    step = StepRequest(micro_batches=run.micro_batches, stages=stages, recompute=run.recompute, pins=pins)
    plan = predicted(with_step(plan, graph, step), graph)
    return (
        plan.step.predicted_seconds or plan.predicted_seconds,
        plan.step.predicted_peak_bytes or plan.predicted_peak_bytes,
    )


def by_numbers(run: TrainingRun, words: int) -> Estimate:
    return estimate(Transformer(LAYERS, HIDDEN, HEADS, SEQUENCE, words), run, hardware_for(run.precision))


def run_of(dp: int, tp: int, pp: int, count: int, recompute: str, zero: int, precision: str, cut: bool) -> TrainingRun:
    return TrainingRun(
        MICRO_BATCH * dp * count, MICRO_BATCH, dp, tp, pp, recompute=recompute, zero=zero,  # type: ignore[arg-type]
        sequence_parallel=cut, precision=precision, software="autoshard",
    )  # fmt: skip


CASES = [  # dp, tp, pp, micro-batches, recompute, ZeRO, precision, words, cut along the sequence
    (1, 1, 2, 4, "selective", 0, "bf16-mixed", 20000, False),
    (2, 2, 2, 4, "none", 0, "fp32", 2000, True),
    (1, 2, 1, 1, "none", 0, "fp8-mixed", 2000, True),
]
SLOW = [
    (1, 1, 1, 1, "none", 0, "fp32", 2000, False),
    (2, 1, 2, 4, "full", 2, "fp32", 2000, False),
    (2, 1, 1, 4, "none", 3, "fp32", 2000, False),
    (1, 1, 1, 4, "full", 0, "bf16-mixed", 20000, False),
    (2, 1, 1, 4, "none", 1, "fp32", 2000, False),
    (1, 2, 1, 1, "full", 0, "fp32", 2000, True),
    (2, 1, 1, 1, "full", 1, "fp32", 2000, False),
    (2, 1, 1, 4, "selective", 2, "bf16-mixed", 20000, False),
    (2, 1, 2, 4, "full", 3, "fp32", 2000, False),
    (2, 2, 1, 4, "full", 1, "fp32", 2000, False),
    (2, 2, 2, 4, "selective", 3, "bf16-mixed", 20000, True),
    (4, 1, 1, 2, "none", 2, "bf16-mixed", 20000, False),
    (1, 2, 3, 6, "full", 0, "fp32", 2000, False),
    (2, 1, 2, 4, "full", 3, "fp8-mixed", 2000, False),
]


@pytest.mark.parametrize("case", [CASES[0], *map(slow, [*CASES[1:], *SLOW])])
def test_the_same_gpt_by_its_numbers_and_captured(case: tuple[int, int, int, int, str, int, str, int, bool]) -> None:
    dp, tp, pp, count, recompute, zero, precision, words, cut = case
    run = run_of(dp, tp, pp, count, recompute, zero, precision, cut)
    seconds, size = planned(run, words)
    forecast = by_numbers(run, words)
    assert forecast.step_seconds == pytest.approx(seconds, rel=0.01)
    assert forecast.memory.peak == pytest.approx(size, rel=0.01)
    assert sum(part for _, part in forecast.parts) == pytest.approx(forecast.step_seconds)


@pytest.mark.parametrize("pp", [1, 2])
def test_weights_are_as_large_wherever_gradients_are_summed(pp: int) -> None:
    """Without ZeRO, replicas hold each gradient from a layer's backward on: they were counted for the weights."""
    runs = [run_of(dp, 1, pp, 4, "none", 0, "fp32", False) for dp in (1, 2)]
    alone, replicas = (by_numbers(run, 2000).memory for run in runs)
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(replicas, part) == pytest.approx(getattr(alone, part), rel=1e-3)
    assert replicas.weights == pytest.approx(replicas.gradients, rel=1e-3)


@pytest.mark.parametrize(
    ("tp", "pp", "recompute"), quick_at([(1, 1, "none"), (1, 1, "full"), (1, 3, "full"), (2, 3, "full")], 1, 2)
)
def test_whoever_trains_it_a_layer_works_with_as_much(tp: int, pp: int, recompute: str) -> None:
    """The default's memory is that of a package but for what its stages hold besides: received and sent tensors, and
    outputs until their backward. Without the gradients inside a layer it was up to 11 % below."""
    run = run_of(1, tp, pp, 6, recompute, 0, "fp32", False)
    model, kernel_run = Transformer(LAYERS, HIDDEN, HEADS, SEQUENCE, 2000), replace(run, software="kernels")
    built = build(model, kernel_run, A100)
    simulated = simulate_step(package_costs(model, run, layers_of_parts(model, run), A100))
    stream = 4 * MICRO_BATCH * SEQUENCE * HIDDEN
    for stage in range(pp):
        memory = stage_memory(built, model, kernel_run, stage_parameters(built, model, kernel_run, stage), stage)
        outputs = stream * in_flight("1f1b", stage, pp, run.micro_batches, 1) * (stage < pp - 1)
        inputs = stream * in_flight("1f1b", stage, pp, run.micro_batches, 1) * (stage > 0)
        held = simulated.costs.buffer_bytes(stage) - inputs + outputs  # a layer keeps its input in any case
        assert memory.peak + held == pytest.approx(simulated.peak_bytes[stage], rel=0.005)


def test_layers_that_are_not_built_take_what_others_do() -> None:
    """Of six layers four are built; where a part has one of several kinds, its bytes and seconds are between theirs."""
    run = run_of(1, 1, 1, 4, "none", 0, "fp32", False)
    model = Transformer(12, HIDDEN, HEADS, SEQUENCE, 2000)
    none, some, full = (package_costs(model, run, [{"all": 12 - count, "input": count}], A100) for count in (0, 6, 12))
    middle = (none.parts[0].saved_bytes + full.parts[0].saved_bytes) / 2
    assert some.parts[0].saved_bytes == pytest.approx(middle)
    assert none.parts[0].backward_seconds < some.parts[0].backward_seconds < full.parts[0].backward_seconds


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("keep", ["input", "expensive"])
def test_layers_that_are_computed_again_take_what_their_own_program_does(zero: int, keep: str) -> None:
    """One program is measured for whatever layers keep, where it is the same; with weights gathered for each use, as
    biases over both axes are under ZeRO 1, it is another."""
    run = run_of(2, 2, 2, 4, "none", zero, "bf16-mixed", True)
    request = package_program._program_key(Transformer(LAYERS, HIDDEN, HEADS, SEQUENCE, 2000), run, 2, keep, 2)
    plan, graph = package_program._plan(replace(request, keep="all"), A100)
    policies = tuple(BlockPolicy(f"layers.{n}", keep) for n in range(4))
    plan = replace(plan, step=replace(plan.step, recompute=policies))
    measured = measured_parts(plan, lower(plan, graph), graph, A100, 2)
    assert package_program._measured(request, A100) == measured


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"precision": "bf16"}, "got bf16"), ({"cp": 2}, "got cp 2"), ({"offload": "optimizer"}, "got offload"),
     ({"pp": 2, "batch": 2}, "a micro-batch for each of their stages")],
)  # fmt: skip
def test_what_packages_are_not_is_refused(changes: dict[str, object], told: str) -> None:
    run = replace(run_of(1, 1, 1, 4, "none", 0, "fp32", False), **changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=told):
        by_numbers(run, 2000)


def test_the_search_finds_what_its_blocks_say_is_best() -> None:
    """Of a step on four devices: rows by their own programs, best first, none below the bound."""
    model = Transformer(LAYERS, HIDDEN, HEADS, SEQUENCE, 2000)
    space = RunSpace(model, TrainingRun(16, 1, precision="fp32", software="autoshard"), 4, {"micro_batch": 2})
    result = package_runs(space, A100, 3)
    assert [row.step_seconds for row in result.best] == sorted(row.step_seconds for row in result.best)
    assert result.others_seconds <= result.best[0].step_seconds * 1.01
    first = result.best[0]
    assert first.run.devices == 4 and first.run.micro_batch == 2 and first.memory.fits(A100)
    assert not first.recomputed and estimate(model, first.run, A100).step_seconds == pytest.approx(first.step_seconds)


SIZES = [(4, 128, 4, 256, 1000), (6, 512, 8, 512, 8000), (8, 1024, 16, 512, 20000)]  # layers, hidden, heads, sequence


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 16])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_choice_by_numbers_is_near_the_best_of_the_captured_model(sizes: tuple[int, ...], devices: int) -> None:
    """Planned from the captured model, with the operators' strategies searched, it is within 3 % of the best step."""
    layers, hidden, heads, sequence, words = sizes
    setup = {"batch": 2, "sequence": sequence, "n_layer": layers, "n_embd": hidden, "n_head": heads,
             "vocabulary": words, "dropout": 0.0}  # fmt: skip
    graph = capture("examples/gpt2.py:build", setup, "bf16-mixed")
    line = block_line(graph)
    whole = ConfigSpace(devices, 64, len(line.blocks), layers)
    run = TrainingRun(64, 1, precision="bf16-mixed", software="autoshard")
    chosen = package_runs(RunSpace(Transformer(*sizes), run, devices, {}), A100, 1).best[0].run
    narrow = replace(
        whole, stages=(chosen.pp,), virtual_stages=(chosen.interleave,), tensor=(chosen.tp,),
        micro_batch=(chosen.micro_batch,), zero=(chosen.zero,),
    )  # fmt: skip

    def best(space: ConfigSpace) -> float:
        result = joint_search(graph, A100, space, A100.usable_memory_bytes)
        return confirmed(result, A100, Origin(graph.source))[0].best.program_seconds

    assert best(narrow) <= 1.03 * best(whole), chosen
