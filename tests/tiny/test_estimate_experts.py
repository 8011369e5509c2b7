"""Estimates with experts and with context parallelism."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.errors import UsageError
from autoshard.estimate.best_runs import best_runs
from autoshard.estimate.gradient_sync import held, syncs
from autoshard.estimate.layer_costs import pieces
from autoshard.estimate.run_space import RunSpace, runs
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import estimate, host_of, parameter_count, used_parameters
from autoshard.estimate.step_bound import fullest, least_alone, least_seconds, program_of
from autoshard.estimate.transformer import FSDP, TrainingRun, Transformer
from autoshard.estimate.transformer_program import build
from autoshard.ir.program import Collective, Compute
from autoshard.simulation import simulate
from tests.slow import quick_at, slow

# --- experts ---


H100 = load_hardware("h100-80g-sxm")
MIXTRAL = Transformer(
    4, 1024, 16, 2048, 32000, 4, 3584, "swiglu", "flash", "rotary", "rms_norm", False, False, experts=8
)
DENSE, EXPERT = 1024 * (2 * 1024 + 2 * 256) + 1024 * 8 + 2 * 1024, 3 * 1024 * 3584  # parameters of a layer


def run(ep: int = 1, dp: int = 4, **changes: object) -> TrainingRun:
    return replace(TrainingRun(8, 1, dp, ep=ep), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ep", "tp", "cp"), quick_at([(1, 1, 1), (2, 1, 1), (4, 1, 1), (4, 2, 1), (2, 1, 2)], 3))
@pytest.mark.parametrize("precision", [slow("bf16"), "bf16-mixed"])
def test_a_layer_sends_tokens_and_keeps_experts_where_they_are(ep: int, tp: int, cp: int, precision: str) -> None:
    """A row of a token for each of its two experts, there and back, forward and backward; no weight moves."""
    built = build(MIXTRAL, run(ep, tp=tp, cp=cp, sequence_parallel=tp > 1, precision=precision), H100)
    events = [e for e in simulate(built.program, built.graph, H100).events if e.module.startswith("layers.1")]
    sent = [(e.phase, e.collective, e.bytes) for e in events if "ep" in e.axes]
    size = 2 * 2048 // cp * 1024 * 2
    ways = ["forward", "forward", "backward", "backward"]
    assert sent == [(direction, "all_to_all", size) for direction in ways if ep > 1]
    params = held(built, "layers.1")
    assert params.experts == 8 * EXPERT // ep // tp
    (block,) = (
        i
        for i in built.program.instructions
        if isinstance(i, Compute) and i.module == "layers.1.experts" and i.target == "autoshard.experts"
    )
    assert (block.variant == "dispatched_experts") == (ep > 1)


def test_parameters_by_hand() -> None:
    held_by = held(build(MIXTRAL, run(), H100), "layers.1")
    assert (held_by.all, held_by.experts) == (DENSE + 8 * EXPERT, 8 * EXPERT)
    tables = 2 * 32000 * 1024
    assert parameter_count(MIXTRAL) == pytest.approx(4 * (DENSE + 8 * EXPERT) + tables, rel=1e-4)
    assert used_parameters(MIXTRAL) == pytest.approx(4 * (DENSE + 2 * EXPERT) + tables, rel=1e-4)
    shared = replace(MIXTRAL, experts=16, top_k=4, expert_hidden=512, shared_experts=2)
    each = 3 * 1024 * 512
    params = held(build(shared, run(4), H100), "layers.1")
    assert params.all - params.experts == DENSE + 1024 * 8 + 2 * each  # eight more in the router; two for every token
    assert params.experts == 16 * each // 4


def test_what_replicas_exchange() -> None:
    """Experts are reduced over those alone that hold the same ones: none where all replicas share them."""
    alone, shared = (syncs(build(MIXTRAL, run(ep), H100), run(ep), H100).layer for ep in (1, 4))
    dense = replace(MIXTRAL, experts=0, feedforward=8)  # attention and norms, with a layer of nothing to speak of
    least = syncs(build(dense, run(), H100), run(), H100).layer
    assert shared.parameters == DENSE + 2 * EXPERT and alone.parameters == DENSE + 8 * EXPERT
    assert shared.reduce_seconds == pytest.approx(least.reduce_seconds, rel=0.05)
    assert alone.reduce_seconds > 5 * shared.reduce_seconds
    half = syncs(build(MIXTRAL, run(2), H100), run(2), H100).layer.reduce_seconds
    assert shared.reduce_seconds < half < alone.reduce_seconds


@pytest.mark.parametrize(("precision", "zeros"), [("bf16", (0, 1, 2, 3)), (FSDP, (2, 3))])
def test_each_stage_of_zero_saves_memory_and_costs_time(precision: str, zeros: tuple[int, ...]) -> None:
    steps = [estimate(MIXTRAL, run(2, zero=zero, precision=precision), H100, Host()) for zero in zeros]
    times, peaks = [one.step_seconds for one in steps], [one.memory.peak for one in steps]
    assert sorted(times[1:]) == times[1:] and sorted(peaks, reverse=True) == peaks
    if precision == "bf16":
        states = 12 * (4 * DENSE + 2 * 32000 * 1024) / 4 + 12 * 4 * 4 * EXPERT / 2  # dense over four, experts over two
        assert steps[1].memory.optimizer == pytest.approx(states, rel=1e-3)


def test_a_full_device_makes_all_wait() -> None:
    """Half more pairs: half more bytes on their way, half more rows in products, half more kept for backward."""
    even, uneven = (build(replace(MIXTRAL, imbalance=x), run(4), H100) for x in (1.0, 1.5))
    sent = [
        [e.bytes for e in simulate(b.program, b.graph, H100).events if e.collective == "all_to_all"]
        for b in (even, uneven)
    ]
    assert sent[1] == [1.5 * size for size in sent[0]]
    one, other = (pieces(b, H100).layer for b in (even, uneven))
    for direction in ("forward", "backward"):
        assert getattr(other, f"{direction}_dispatch_seconds") > 1.3 * getattr(one, f"{direction}_dispatch_seconds") > 0
        assert getattr(other, f"{direction}_seconds") > 1.1 * getattr(one, f"{direction}_seconds")
    activations = [estimate(replace(MIXTRAL, imbalance=x), run(4), H100).memory.activations for x in (1.0, 1.5)]
    rows = 4 * 2 * 2048 * 2 * (1024 + 2 * 3584 + 3584)  # layers, pairs, bytes; results are of own tokens
    assert activations[1] - activations[0] == pytest.approx(0.5 * rows)


def test_no_device_has_more_than_all_pairs() -> None:
    most, more = (estimate(replace(MIXTRAL, imbalance=x), run(2), H100).step_seconds for x in (2.0, 8.0))
    assert most == more
    alone, whole = (estimate(replace(MIXTRAL, imbalance=x), run(1), H100).step_seconds for x in (1.0, 8.0))
    assert alone == whole


def test_parts_add_up_with_experts() -> None:
    step = estimate(MIXTRAL, run(4, dp=4, pp=2, recompute="full"), H100)
    assert sum(seconds for _, seconds in step.parts) == pytest.approx(step.step_seconds)
    assert dict(step.parts)["layers: tokens to their experts and back"] > 0
    assert step.band.steps == 0 and step.band.error >= 0.6  # nobody measured such a step


@pytest.mark.parametrize("ep", quick_at([1, 2], 0))
def test_no_bound_is_above_a_step_whose_routers_learn_on_several_replicas(ep: int) -> None:
    """Over tensor-parallel devices and replicas together their gradient is summed at once, over the former alone not:
    the program of one replica has one more sum of tokens' weights in its backward."""
    model = Transformer(6, 720, 12, 360, 1440, activation="swiglu", tied=False, experts=4)
    for setup in (run(ep, 4, batch=32, tp=2, pp=2, zero=2, precision=FSDP), run(ep, 4, tp=2, precision="fp32")):
        alone = program_of(model, setup, H100)
        bound = least_seconds(model, setup, alone, H100, host_of(H100))
        assert least_alone(model, setup, alone, H100, host_of(H100)) <= bound
        assert bound <= estimate(model, setup, H100).step_seconds * (1 + 1e-9)
        here, there = pieces(alone, H100).layer, pieces(build(model, setup, H100), H100).layer
        assert here.backward_seconds == pytest.approx(there.backward_seconds)
        assert here.backward_kernels == there.backward_kernels


def test_a_search_shares_experts() -> None:
    fixed = {"tp": 1, "pp": 1, "recompute": "none", "micro_batch": 1}
    space = RunSpace(MIXTRAL, TrainingRun(8, 1), 8, fixed)
    listed = list(runs(space, H100))
    assert {one.ep for one in listed} == {1, 2, 4, 8}
    for one in listed:
        built, step = program_of(MIXTRAL, one, H100), estimate(MIXTRAL, one, H100)
        assert least_seconds(MIXTRAL, one, built, H100, host_of(H100)) <= step.step_seconds * (1 + 1e-9), one
        assert fullest(MIXTRAL, one, built).peak == pytest.approx(step.memory.peak), one
    best = best_runs(space, H100, 1).best[0]
    assert best.step_seconds == min(estimate(MIXTRAL, one, H100).step_seconds for one in listed)


@pytest.mark.parametrize(
    ("model", "rest", "told"),
    [
        ({"top_k": 9}, {}, "top-k 9: expected 1 to 8, the experts there are"),
        ({}, {"ep": 3}, "ep 3 does not divide 8 experts"),
        ({}, {"ep": 8}, "ep 8 does not divide dp 4"),
        ({"imbalance": 9.0}, {}, r"imbalance 9: expected 1 \(even\) to 8"),
        ({"experts": 0, "shared_experts": 1}, {}, "shared-experts says something of experts: how many are there?"),
        ({"experts": 0}, {"ep": 2}, "ep says something of experts"),
        ({"expert_hidden": 1001}, {"tp": 2}, "tp 2 does not divide expert width 1001"),
    ],
)
def test_what_does_not_fit_is_named(model: dict[str, int], rest: dict[str, int], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        estimate(replace(MIXTRAL, **model), run(**rest), H100)  # type: ignore[arg-type]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "sequence": 512, "vocabulary": 1000, "batch": 8, "dp": 4}
    words = ["estimate", "--hardware", "h100-80g-sxm", *(w for k, v in sizes.items() for w in (f"--{k}", str(v)))]
    assert main([*words, "--experts", "16", "--top-k", "4", "--ep", "4", "--imbalance", "1.25"]) == 0
    printed = capsys.readouterr().out
    assert "dp=4,ep=4 of dp,tp=1,pp=1 (4 devices)" in printed
    assert "16 experts of 2048, 4 a token, the fullest device with 1.25 times the average" in printed
    assert main([*words, "--experts", "16", "--imbalance", "1.25", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["experts"] == 16
    assert main([*words, "--experts", "16", "--imbalance", "1.25"]) == 0
    assert "ignored: --imbalance 1.25" in capsys.readouterr().out
    for wrong in ("0.5", "many", "inf"):
        assert main([*words, "--experts", "16", "--imbalance", wrong]) == 2
        assert f"--imbalance '{wrong}': expected a number, at least 1" in capsys.readouterr().err


# --- context parallelism ---


LLAMA = Transformer(4, 2048, 16, 16384, 8000, 4, 5632, "swiglu", "flash", "rotary", "rms_norm", False, False)


def context_run(cp: int, **changes: object) -> TrainingRun:
    return replace(TrainingRun(4, 1, cp=cp), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_communicates_by_its_ring_alone(tp: int) -> None:
    """Every other operator works on its own part of the sequence: nothing but weights moves over the axis."""
    built = build(LLAMA, context_run(4, tp=tp, sequence_parallel=tp > 1), H100)
    for item in built.program.instructions:
        if isinstance(item, Collective) and "cp" in item.axes:
            assert item.forward in ("slice", ""), item  # of the rotary tables, which all devices make
    rings = [item for item in built.program.instructions if isinstance(item, Compute) and "ring" in item.variant]
    assert [ring.axes for ring in rings] == [(("queries", ("cp",)), ("keys", ("cp",)))] * 2
    gathered = [e for e in simulate(built.program, built.graph, H100).events if "cp" in e.axes and e.phase == "forward"]
    assert {event.collective for event in gathered if event.module.startswith("layers")} == {"all_gather"}
    keys = 2 * 16384 * 4 * 128 // tp * 2  # two tensors of four heads of 128, in bf16
    assert {event.bytes for event in gathered if event.module.startswith("layers")} == {keys}


def test_devices_share_a_sequences_work_and_memory() -> None:
    """Four devices take a quarter of the arithmetic of one, for causal attention is shared evenly too; with it they are
    at least a third as long at work, and keep a quarter of the activations."""
    one, four = (pieces(build(LLAMA, context_run(cp), H100), H100).layer for cp in (1, 4))
    for alone, shared in (
        (one.forward_seconds, four.forward_seconds - four.forward_communication_seconds),
        (one.backward_seconds, four.backward_seconds - four.backward_communication_seconds),
    ):
        assert alone / 4 <= shared <= alone / 3
    whole, part = (estimate(LLAMA, context_run(cp), H100, Host()) for cp in (1, 4))
    assert part.memory.activations == pytest.approx(whole.memory.activations / 4, rel=0.02)
    assert part.memory.weights == whole.memory.weights
    assert whole.step_seconds / 4 < part.step_seconds < whole.step_seconds / 2


def test_they_reduce_gradients_and_share_optimizer_states() -> None:
    """As replicas do: Megatron-Core's distributed optimizer cuts over both."""
    built = build(LLAMA, context_run(2, dp=2), H100)
    alike = build(LLAMA, context_run(1, dp=4), H100)
    one, other = (syncs(b, r, H100).layer for b, r in ((built, context_run(2, dp=2)), (alike, context_run(1, dp=4))))
    assert one == other and one.reduce_seconds > 0
    sharded, whole = (estimate(LLAMA, context_run(4, zero=zero), H100).memory.optimizer for zero in (1, 0))
    assert sharded == pytest.approx(whole / 4)


def test_what_can_not_be_shared_is_named() -> None:
    with pytest.raises(UsageError, match="cp 3 does not divide the sequence 16384"):
        estimate(LLAMA, context_run(3), H100)
    with pytest.raises(UsageError, match=r"cp 2 x tp 2 does not divide the sequence 1026"):
        estimate(replace(LLAMA, sequence=1026), context_run(2, tp=2, sequence_parallel=True), H100)
    with pytest.raises(UsageError, match=r"context parallelism \(cp 2\) needs a fused attention, got unfused"):
        estimate(replace(LLAMA, attention="unfused"), context_run(2), H100)


@pytest.mark.slow
def test_the_command_with_context_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "sequence": 4096, "vocabulary": 1000, "batch": 4, "cp": 2, "tp": 2}
    words = ["estimate", "--hardware", "h100-80g-sxm", *(w for k, v in sizes.items() for w in (f"--{k}", str(v)))]
    assert main(words) == 0
    assert "dp=1,cp=2,tp=2,pp=1 (4 devices)" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 4
    assert main([*words, "--search", "--devices", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {(r["run"]["cp"], r["run"]["tp"]) for r in answer["best"]} == {(2, 2)}
    assert {r["run"]["dp"] * r["run"]["pp"] for r in answer["best"]} == {2}
