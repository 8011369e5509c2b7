"""`autoshard estimate`: the graph it writes, the Program it builds, published memory figures, and its arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.errors import UsageError
from autoshard.estimate.gradient_sync import held, parameter_collectives, syncs, waiting
from autoshard.estimate.layer_costs import pieces
from autoshard.estimate.stage_slots import Host, Stages
from autoshard.estimate.step import estimate, parameter_count
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_graph import transformer_graph
from autoshard.estimate.transformer_program import build
from autoshard.ir.graph_check import check
from autoshard.ir.program import Collective, Compute
from autoshard.program.schedules.pipeline_schedule import SCHEDULES
from autoshard.simulation import simulate

A100 = load_hardware("a100-80g-sxm")
SMALL = Transformer(4, 256, 8, 128, 1000)
GPT_22B = Transformer(48, 6144, 64, 2048, 51200, attention="unfused", dropout=True)
GIB = 2**30


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-mixed"])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_the_graph_is_valid(precision: str, attention: str) -> None:
    llama = replace(SMALL, attention=attention, activation="swiglu", positions="rotary", norm="rms_norm", bias=False)
    for model in (replace(SMALL, attention=attention, dropout=True), replace(llama, tied=False)):
        check(transformer_graph(model, 4, precision, "adamw").graph)


def test_parameters_are_those_of_the_program() -> None:
    built = build(SMALL, TrainingRun(1, 1, precision="fp32"), A100)
    held = sum(built.graph.tensor(p.tensor).numel for p in built.graph.parameters)
    assert parameter_count(replace(SMALL, layers=2)) == pytest.approx(held, rel=5e-3)  # biases and norms


@pytest.mark.parametrize(("sequence_parallel", "kinds"), [(False, ["P R"] * 2), (True, ["P S1"] * 2)])
def test_a_layer_communicates_as_megatron_does(sequence_parallel: bool, kinds: list[str]) -> None:
    """Two sums a layer in the forward (arXiv:1909.08053); reduce-scatters under sequence parallelism."""
    run = TrainingRun(8, 2, dp=2, tp=2, sequence_parallel=sequence_parallel)
    program = build(SMALL, run, A100).program
    collectives = [i for i in program.instructions if isinstance(i, Collective) and i.module.startswith("layers.1")]
    assert [f"{kind_of(i.before)} {kind_of(i.after)}" for i in collectives if kind_of(i.before) == "P"] == kinds


def kind_of(placement: Any) -> str:
    """Of one placement, or of the only one of a tuple."""
    text = str(placement[0] if isinstance(placement, tuple) else placement)
    return text.removesuffix("+")


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_one_stage_and_micro_batch_is_the_simulated_program(dp: int, tp: int) -> None:
    """Two layers are the whole program, so the step is the sum of what `simulate` says, but for bucket copies."""
    model = replace(SMALL, layers=2, hidden=1024, sequence=512)
    run = TrainingRun(4 * dp, 4, dp, tp, precision="fp32")
    step = estimate(model, run, A100, Host())
    built = build(model, run, A100)
    assert step.step_seconds == pytest.approx(simulate(built.program, built.graph, A100).step_seconds, rel=0.05)
    assert sum(seconds for _, seconds in step.parts) == pytest.approx(step.step_seconds)


def test_activation_memory_is_the_published_one() -> None:
    """Korthikanti et al. 2022, figure 1: 22B, TP 8, micro-batch 4; GiB per device."""
    run = TrainingRun(4, 4, 1, 8)
    plain = estimate(GPT_22B, run, A100).memory
    lean = estimate(GPT_22B, replace(run, sequence_parallel=True, recompute="selective"), A100).memory
    assert plain.activations / GIB == pytest.approx(59.25, rel=0.02)
    assert lean.activations / GIB == pytest.approx(9.5625, rel=0.02)
    assert (plain.weights + plain.gradients + plain.optimizer) / GIB == pytest.approx(45.5625, rel=0.025)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(["none", "selective", "full"]))
def test_recomputing_costs_time_and_saves_memory(pp: int, tp: int, recompute: Any) -> None:
    run = TrainingRun(16, 2, 1, tp, pp)
    plain, recomputed = estimate(SMALL, run, A100), estimate(SMALL, replace(run, recompute=recompute), A100)
    assert recomputed.step_seconds >= plain.step_seconds and recomputed.memory.activations <= plain.memory.activations


def test_optimizer_sharding_divides_states() -> None:
    """And holds whole what it works on: the gradient being scattered (2 and 3), the weights computed with (3)."""
    run = TrainingRun(16, 2, 4)
    sizes = [estimate(SMALL, replace(run, zero=zero), A100).memory for zero in range(4)]
    each = held(build(SMALL, run, A100), "layers.1").all
    assert sizes[1].optimizer == pytest.approx(sizes[0].optimizer / 4) and sizes[1].gradients == sizes[0].gradients
    assert sizes[2].gradients == pytest.approx(sizes[0].gradients / 4 + 4 * each)
    assert sizes[2].weights == sizes[0].weights
    assert sizes[3].weights == pytest.approx(sizes[0].weights / 4 + 2 * each)
    assert sizes[3].peak < sizes[2].peak < sizes[1].peak < sizes[0].peak


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_micro_batch_reduces_weight_gradients(precision: str, sequence_parallel: bool) -> None:
    """Replicas exchange nothing in a slot, and tensor parallelism costs as much beside one replica as beside four."""
    alone, several = (
        pieces(build(SMALL, run, A100), A100)
        for run in (TrainingRun(8, 2, dp, 2, precision=precision, sequence_parallel=sequence_parallel) for dp in (1, 4))
    )
    for one, four in zip((alone.layer, alone.core), (several.layer, several.core), strict=True):
        assert four.forward_communication_seconds == pytest.approx(one.forward_communication_seconds)
        assert four.backward_communication_seconds == pytest.approx(one.backward_communication_seconds)
    no_tensor = pieces(build(SMALL, TrainingRun(8, 2, 4, precision=precision), A100), A100).layer
    assert no_tensor.forward_communication_seconds == no_tensor.backward_communication_seconds == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_every_collective_is_a_slots_or_a_steps(precision: str) -> None:
    """Over the data axis go parameters (and the loss, summed): what the slots leave out is what the tail holds."""
    program = build(SMALL, TrainingRun(8, 2, 4, 2, precision=precision), A100).program
    once = parameter_collectives(program)
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Collective) and "dp" in instruction.axes:
            assert index in once or instruction.module.startswith("head"), instruction
    reduced = {path for bucket in program.gradient_buckets if "dp" in bucket.axes for path in bucket.parameters}
    moved = {program.instructions[index].operand for index in once}  # type: ignore[union-attr]
    casts = {i.results[0]: i.operands[0] for i in program.instructions if isinstance(i, Compute) and i.operands}
    moved |= {casts.get(name) or "" for name in moved}
    for parameter in program.parameters:
        assert parameter.path in reduced or parameter.value in moved, parameter.path


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 8]), st.sampled_from([2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2]),
    st.booleans(), st.sampled_from(["none", "full"]),
)  # fmt: skip
def test_more_sharding_costs_time_and_saves_memory(
    micro_batches: int, dp: int, tp: int, pp: int, overlap: bool, recompute: Any
) -> None:
    run = TrainingRun(2 * dp * micro_batches, 2, dp, tp, pp, recompute=recompute, overlap=overlap)
    one, two, three = (estimate(SMALL, replace(run, zero=zero), A100) for zero in (1, 2, 3))
    seconds = [step.step_seconds for step in (one, two, three)]
    assert seconds == sorted(seconds)
    assert overlap or seconds[1] < seconds[2]
    assert overlap or micro_batches == 1 or seconds[0] < seconds[1]
    exposed = [estimate(SMALL, replace(run, zero=zero, overlap=False), A100).step_seconds for zero in (1, 2, 3)]
    assert all(hidden <= plain for hidden, plain in zip(seconds, exposed, strict=True))
    for step in (one, two, three):
        assert sum(part for _, part in step.parts) == pytest.approx(step.step_seconds)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 10)] * 3), min_size=1, max_size=6))
def test_waiting_lies_between_the_ends_and_everything(pieces: list[tuple[float, float, float]]) -> None:
    compute, gathers, reductions = (list(column) for column in zip(*pieces, strict=True))
    everything = waiting(compute, gathers, reductions, False)
    hidden = waiting(compute, gathers, reductions, True)
    assert everything == pytest.approx(sum(gathers) + sum(reductions))
    least = max(gathers[0] + reductions[-1], sum(gathers) + sum(reductions) - sum(compute))
    assert least - 1e-9 <= hidden <= everything + 1e-9


def test_a_slow_host_is_what_small_layers_wait_for() -> None:
    run = TrainingRun(16, 1)
    fast, slow = (estimate(SMALL, run, A100, Host(seconds)) for seconds in (0.0, 1e-3))
    kernels = 33 * SMALL.layers * 16  # of forwards and backwards
    assert fast.step_seconds < 0.2 * slow.step_seconds
    assert slow.step_seconds > 0.7 * kernels * 1e-3


@pytest.mark.parametrize(
    ("model", "run", "message"),
    [
        (SMALL, TrainingRun(10, 4), "batch 10 is no multiple of micro-batch 4"),
        (SMALL, TrainingRun(8, 1, tp=3), "tp 3 does not divide 8 heads"),
        (SMALL, TrainingRun(8, 1, pp=7), "4 layers are too few for 7 pipeline chunks"),
        (SMALL, TrainingRun(8, 1, pp=2, stage_layers=(1, 2)), "stage layers 1,2: expected 4 layers together, got 3"),
        (SMALL, TrainingRun(8, 1, pp=2, stage_layers=(4,)), "expected 2 numbers, one for each chunk of pp 2"),
        (SMALL, TrainingRun(8, 1, stage_layers=(2, 2)), "expected 1 number, one for each chunk of pp 1 x interleave 1"),
        (SMALL, TrainingRun(6, 1, pp=4, schedule="interleaved"), "micro-batches in multiples of pp 4"),
        (replace(SMALL, hidden=0), TrainingRun(8, 1), "hidden must be positive"),
    ],
)
def test_numbers_that_do_not_fit_are_named(model: Transformer, run: TrainingRun, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        estimate(model, run, A100)


def test_a_dtype_that_is_not_there_is_refused_with_those_that_are() -> None:
    ascend = load_hardware("ascend-910a")
    with pytest.raises(UsageError, match="--precision bf16: ascend-910a has no bfloat16") as error:
        estimate(SMALL, TrainingRun(8, 1), ascend)
    assert error.value.hint == "--precision fp32 or --precision fp16-mixed or --precision fp16"
    half, whole = (estimate(SMALL, TrainingRun(8, 1, precision=name), ascend) for name in ("fp16", "fp32"))
    assert half.step_seconds < whole.step_seconds and half.memory.activations < whole.memory.activations


def test_both_half_precisions_cost_the_same_where_both_are() -> None:
    half, brain = (estimate(SMALL, TrainingRun(8, 1, 2, precision=name), A100) for name in ("fp16", "bf16"))
    assert (half.step_seconds, half.memory) == (brain.step_seconds, brain.memory)


def test_a_cluster_that_is_too_small_is_named() -> None:
    with pytest.raises(UsageError, match="at most"):
        estimate(SMALL, TrainingRun(2**14, 1, dp=2**14), A100)


SIZES = {"layers": 4, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": 1000, "batch": 16, "micro-batch": 2}
WORDS = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "pipeline.json"
    words = ["estimate", "--hardware", "a100-80g-sxm", *WORDS, "--pp", "2", "-o", str(trace), "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["devices"] == 2 and answer["fits"] is True
    assert sum(answer["parts_seconds"].values()) == pytest.approx(answer["step_seconds"])
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 2 * 2 * 8  # both ways, on both stages, 8 micro-batches
    assert main(words[:-1]) == 0
    assert "pipeline bubble" in capsys.readouterr().out


def test_the_command_says_how_sure_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """By measured steps of the kind; a device that nobody measured says so."""
    for name, words in (
        ("a100-80g-sxm", "releases)"),
        ("mi300x-192g", "±60% (not validated by measurements, uncalibrated)"),
    ):
        assert main(["estimate", "--hardware", name, *WORDS]) == 0
        band = next(line for line in capsys.readouterr().out.splitlines() if "error band" in line)
        assert "±" in band and band.endswith(words), band


def test_what_is_no_part_of_a_step_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Large layers wait for no host; small ones do."""
    sizes = {"layers": 8, "heads": 96, "sequence": 2048, "vocabulary": 51200, "batch": 8, "micro-batch": 1, "tp": 8}
    words = [f"--{name}={size}" for name, size in sizes.items()]
    for hidden, waits in (("12288", False), ("96", True)):
        assert main(["estimate", "--hardware", "a100-80g-sxm", *words, "--dp=1", "--hidden", hidden]) == 0
        assert ("waiting for the host" in capsys.readouterr().out) is waits


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(["none", "selective", "full"]))
def test_the_band_is_of_all_that_a_stage_does(pp: int, tp: int, recompute: Any) -> None:
    """What formulas price in a stage's slots is what its parts add up to, when nothing waits for the host."""
    run = TrainingRun(16, 2, 1, tp, pp, recompute=recompute)
    built = build(SMALL, run, A100)
    stages = Stages(SMALL, run, pieces(built, A100), syncs(built, run, A100), Host())
    for stage in range(pp):
        order = SCHEDULES[run.schedule](stage, pp, run.micro_batches, 1)
        families, parts = stages.families(stage, order), dict(stages.parts(stage, order))
        assert sum(families.values()) == pytest.approx(sum(parts.values()))
        # At the ends collectives are not told apart.
        assert families.get("collective", 0.0) >= parts["layers: tensor-parallel communication"] * (1 - 1e-9)


def test_what_says_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "--hardware", "a100-80g-sxm", *WORDS]
    assert main([*words, "--sequence-parallel", "--zero", "1", "--schedule", "gpipe"]) == 0
    assert "ignored: --sequence-parallel, --zero 1, --schedule gpipe" in capsys.readouterr().out
    assert main([*words, "--tp", "2", "--sequence-parallel"]) == 0
    assert "ignored" not in capsys.readouterr().out


@pytest.mark.parametrize(("software", "precision"), [("autoshard", "bf16-mixed"), ("megatron", "bf16")])
def test_the_precision_is_one_that_the_software_has(
    capsys: pytest.CaptureFixture[str], software: str, precision: str
) -> None:
    assert main(["estimate", "--hardware", "a100-80g-sxm", *WORDS, "--software", software, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["precision"] == precision
