"""Estimates of FSDP, of optimizer offload and of float8."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.costs.collective import collective_seconds
from autoshard.costs.compute import gradient_cast_seconds, local_op_seconds
from autoshard.errors import InfeasibleError, UsageError
from autoshard.estimate.best_runs import best_runs
from autoshard.estimate.gradient_sync import held, syncs, waiting
from autoshard.estimate.layer_costs import pieces
from autoshard.estimate.optimizer_step import stage_parameters
from autoshard.estimate.run_space import RunSpace
from autoshard.estimate.stage_slots import Host, Stages
from autoshard.estimate.step import estimate
from autoshard.estimate.transformer import FSDP, TrainingRun, Transformer
from autoshard.estimate.transformer_program import build
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Compute
from autoshard.program.schedules.pipeline_schedule import Slot
from autoshard.step_corrections import software
from tests.slow import quick_at

# --- FSDP ---


A100, H100, ASCEND = (load_hardware(name) for name in ("a100-80g-sxm", "h100-80g-sxm", "ascend-910b2"))
MODEL = Transformer(4, 256, 8, 128, 1000, bias=False)
RUN = TrainingRun(32, 2, 4, zero=3, precision=FSDP)


def stages(run: TrainingRun) -> Stages:
    built = build(MODEL, run, A100)
    return Stages(MODEL, run, pieces(built, A100), syncs(built, run, A100), Host())


def test_a_block_is_gathered_for_each_way_and_scattered_once_a_micro_batch() -> None:
    """Full sharding gathers forward and backward; sharding of the gradients gathers forward alone."""
    full, gradients = stages(RUN), stages(replace(RUN, zero=2))
    gathered = (
        4 * full.syncs.layer.gather_seconds + full.syncs.embedding.gather_seconds + full.syncs.head.gather_seconds
    )
    reduced = sum(
        times * (sync.reduce_seconds + sync.cast_seconds)
        for times, sync in ((4, full.syncs.layer), (1, full.syncs.embedding), (1, full.syncs.head))
    )
    forward, backward = Slot("F", 0, 0), Slot("B", 0, 0)
    assert full.replica_seconds(0, forward) == pytest.approx(gathered)
    assert full.replica_seconds(0, backward) == pytest.approx(gathered + reduced)
    assert gradients.replica_seconds(0, forward) == pytest.approx(gathered)
    assert gradients.replica_seconds(0, backward) == pytest.approx(reduced)
    assert full.step_end_seconds(0) == gradients.step_end_seconds(0) == 0


def test_bf16_is_gathered_and_float32_reduced_and_updated() -> None:
    mesh = Mesh((("replica", 1), ("shard", 4), ("tp", 1)))
    count = held(build(MODEL, RUN, A100), "layers.1").all
    sync = stages(RUN).syncs.layer
    assert sync.gather_seconds == pytest.approx(collective_seconds(A100, mesh, 1, "all_gather", 2 * count))
    assert sync.reduce_seconds == pytest.approx(collective_seconds(A100, mesh, 1, "reduce_scatter", 4 * count))
    half = stages(replace(RUN, reduced="bf16")).syncs.layer
    assert half.reduce_seconds == pytest.approx(collective_seconds(A100, mesh, 1, "reduce_scatter", 2 * count))


def test_what_fsdp_holds() -> None:
    """float32 shards of weights, gradients and two moments; the block in use in bf16, with `overlap` the next too; its
    gradient in bf16 and as it is reduced; in bf16 all that is in no block, which the outermost module gathers."""
    one = held(build(MODEL, RUN, A100), "layers.1").all
    outside = (MODEL.vocabulary + MODEL.sequence + 2) * MODEL.hidden
    plain = estimate(MODEL, RUN, A100).memory
    ahead = estimate(MODEL, replace(RUN, overlap=True), A100).memory
    gathered = estimate(MODEL, replace(RUN, zero=2), A100).memory
    whole = estimate(MODEL, replace(RUN, dp=1, zero=0, batch=8), A100).memory
    assert plain.optimizer == whole.optimizer / 4
    assert plain.weights == pytest.approx(whole.weights / 4 + 2 * (one + outside))
    assert plain.gradients == pytest.approx(whole.gradients / 4 + 6 * one)
    assert ahead.weights - plain.weights == pytest.approx(2 * one)
    assert gathered.weights - plain.weights == pytest.approx(3 * 2 * one)  # all four blocks stay gathered


def test_groups_of_shards_gather_inside_and_sum_across() -> None:
    """HSDP on two nodes: gathers stay in a node, the shards of a gradient are summed between them."""
    run = replace(RUN, dp=16, batch=64)
    wide, grouped = (syncs(build(MODEL, setup, A100), setup, A100).layer for setup in (run, replace(run, shard=8)))
    mesh = Mesh((("replica", 2), ("shard", 8), ("tp", 1)))
    size = 4.0 * grouped.parameters
    scattered, summed = (
        collective_seconds(A100, mesh, 1, "reduce_scatter", size),
        collective_seconds(A100, mesh, 0, "all_reduce", size / 8),
    )
    assert grouped.gather_seconds < wide.gather_seconds
    assert grouped.reduce_seconds == pytest.approx(scattered + summed)
    memory = [estimate(MODEL, setup, A100).memory.peak for setup in (run, replace(run, shard=8), replace(run, shard=2))]
    assert memory == sorted(memory) and memory[0] < memory[2]


def test_what_is_hidden_slows_what_hides_it() -> None:
    compute, gathers, nothing = [1.0, 1.0], [0.5, 0.5], [0.0, 0.0]
    assert waiting(compute, gathers, nothing, True) == pytest.approx(0.5)  # the first has nothing beside it
    assert waiting(compute, gathers, nothing, True, 0.2) == pytest.approx(0.5 + 0.2 * 0.5)
    assert waiting(compute, gathers, nothing, False, 0.2) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (replace(RUN, shard=3), "shard groups of 3 do not divide 4 replicas"),
        (replace(RUN, zero=1), "precision bf16-fsdp keeps shards of the weights: it needs zero 2 or 3"),
        (replace(RUN, reduced="int8"), "reduced 'int8'"),
        (replace(RUN, software="mine"), "unknown software 'mine'"),
    ],
)
def test_runs_that_do_not_fit_are_named(run: TrainingRun, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        estimate(MODEL, run, A100)


def test_slower_kernels_take_longer_where_they_are_known() -> None:
    """By the papers: Triton's kernel of 2023, then FlashAttention-2, then 3 (Hopper alone)."""
    long = replace(MODEL, sequence=4096)
    run = TrainingRun(4, 1)
    known = ("flash1", "triton", "flash2", "flash3")
    seconds = [estimate(replace(long, attention=name), run, H100, Host()).step_seconds for name in known]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    with pytest.raises(UsageError, match="attention flash3: nothing is known of it on a100-80g-sxm, only on hopper"):
        estimate(replace(long, attention="flash3"), run, A100)
    with pytest.raises(UsageError, match="software fsdp: nothing is known of it on ascend-910b2"):
        estimate(MODEL, replace(run, software="fsdp"), ASCEND)


def test_products_under_load_are_slower_and_nothing_else_changes() -> None:
    rate = software.sustained(A100, "fsdp")
    changed = dict(software.with_software(A100, "fsdp").constants)
    assert 0 < rate < 1
    different = {key: changed[key] / value for key, value in A100.constants if changed[key] != value}
    assert different == pytest.approx({"matmul.compute": rate, "matmul.memory": rate})
    assert software.with_software(A100, software.KERNELS).constants == A100.constants


def test_a_fused_loss_is_faster() -> None:
    run = TrainingRun(8, 8)
    plain, fused = (estimate(replace(MODEL, fused_loss=flag), run, A100, Host()).step_seconds for flag in (False, True))
    assert fused < plain


def test_every_figure_has_a_kind_and_a_source() -> None:
    tables = software.tables()
    rows = [{key: value for key, value in entry.items() if key != "summary"} for entry in tables["attention"].values()]
    for entry in tables["software"].values():
        kinds = {key: value for key, value in entry.items() if key != "summary"}
        assert kinds and set(kinds) <= {"products", "dispatch", "stall"}
        rows += kinds.values()
    for entry in tables["memory"].values():
        assert all(set(figure) == {"value", "kind", "source"} for key, figure in entry.items() if key != "summary")
    for figures in rows:
        assert figures and set(figures) <= set(tables["generations"])
        assert all(set(figure) == {"value", "kind", "source"} for figure in figures.values())


def test_buffers_of_weight_gradients_are_a_layers_weights_once_more() -> None:
    """TransformerEngine's: in bfloat16, whatever the depth; time and band are those of kernels."""
    for layers in (2, 8):
        plain, core = (
            estimate(replace(MODEL, layers=layers), TrainingRun(8, 1, software=name), A100)
            for name in ("kernels", "megatron-core")
        )
        weights = 12 * MODEL.hidden**2 * 2
        assert core.memory.peak - plain.memory.peak == pytest.approx(weights, rel=0.01)
        assert core.step_seconds == plain.step_seconds and core.band == plain.band


def test_deepspeed_holds_half_precision_gradients_its_stages_ends_and_buckets() -> None:
    """By hand: 2 instead of 4 bytes a gradient in fp16, 6 in bf16; two stage inputs for each of two in flight."""
    run = TrainingRun(32, 2, 2, 1, 2, zero=1)
    tensor, buckets = 2 * MODEL.sequence * MODEL.hidden * 2, 1.86 * 2**30
    for precision, more in (("fp16", -2), ("bf16", 2)):
        plain, deepspeed = (
            estimate(MODEL, replace(run, precision=precision, software=name), A100).memory
            for name in ("kernels", "deepspeed")
        )
        parameters = plain.weights / 2
        assert deepspeed.gradients - plain.gradients == pytest.approx(more * parameters + buckets)
        assert deepspeed.working - plain.working == pytest.approx(8.6 * 2**30)
        assert deepspeed.activations - plain.activations in (pytest.approx(2 * tensor), pytest.approx(4 * tensor))


def test_software_brings_its_host() -> None:
    """Eager Megatron's host is slower than the profile's; what a person says of the host counts more."""
    known = software.host_figures(A100, "megatron")["dispatch"]
    assert known and known > A100.constant("host.dispatch")
    run = TrainingRun(8, 1)
    plain, megatron, with_host = (
        estimate(MODEL, replace(run, software=name), A100, host).step_seconds
        for name, host in (("kernels", None), ("megatron", None), ("megatron", Host(1e-6)))
    )
    assert with_host < plain < megatron


def test_the_only_micro_batch_has_no_gradients_at_its_loss() -> None:
    """Those of one before it, or Megatron's buffers, are there; 4 bytes a parameter."""
    run = TrainingRun(4, 4, precision="fp32")
    alone, two = (estimate(MODEL, setup, A100).memory for setup in (run, replace(run, batch=8)))
    assert (alone.gradients, two.gradients) == (0.0, two.weights)
    assert alone.peak == pytest.approx(two.peak - two.weights, rel=0.01)
    assert estimate(MODEL, replace(run, precision="bf16"), A100).memory.gradients > 0
    # A loss that needs little: all gradients, as the backward ends, are more than it.
    few = replace(MODEL, vocabulary=64, sequence=16)
    assert estimate(few, run, A100).memory.gradients > 0


def test_a_loss_in_float32_keeps_its_logits_so() -> None:
    """By hand: half-precision logits, as autograd keeps the loss's own, against float32 ones; nothing in float32."""
    run, logits = TrainingRun(4, 4), 4 * MODEL.sequence * MODEL.vocabulary
    plain, wide = (estimate(replace(MODEL, fp32_loss=flag), run, A100).memory.activations for flag in (False, True))
    assert wide - plain == pytest.approx(2 * logits, rel=0.01)
    whole = replace(run, precision="fp32")
    assert estimate(replace(MODEL, fp32_loss=True), whole, A100).memory == estimate(MODEL, whole, A100).memory
    with pytest.raises(UsageError, match="fp32-loss and fused-loss"):
        estimate(replace(MODEL, fp32_loss=True, fused_loss=True), run, A100)


def test_dtensors_loss_over_a_cut_vocabulary_holds_one_copy_more() -> None:
    model, run = replace(MODEL, vocabulary=8000, fp32_loss=True), replace(RUN, tp=2, batch=32, micro_batch=8)
    plain, fsdp = (estimate(model, replace(run, software=name), A100).memory.working for name in ("kernels", "fsdp"))
    assert fsdp - plain == 4 * run.micro_batch * model.sequence * model.vocabulary / 2


def test_dtensor_keeps_whole_what_it_gathered_along_the_sequence() -> None:
    """By hand: the inputs of attention, of the feed-forward layer and of the head; half of each is the device's own."""
    model = replace(MODEL, vocabulary=8000, sequence=512)
    run = replace(RUN, tp=2, batch=32, micro_batch=8, sequence_parallel=True)
    plain, fsdp = (
        estimate(model, replace(run, software=name), A100).memory.activations for name in ("kernels", "fsdp")
    )
    stream = 2 * run.micro_batch * model.sequence * model.hidden
    assert fsdp - plain == (2 * model.layers + 1) * stream / 2


# --- `autoshard estimate --offload optimizer`: states in the memory of the host, which updates them ---


WIDER = Transformer(4, 1024, 8, 512, 8000)


def parts(run: TrainingRun) -> dict[str, float]:
    return {name: seconds for name, seconds in estimate(WIDER, run, A100).parts if name.startswith("optimizer")}


@pytest.mark.parametrize(("precision", "weight"), [("bf16", 2), ("fp32", 4), ("bf16-mixed", 4)])
def test_by_hand(precision: str, weight: int) -> None:
    """Gradients down, as many passes as on the device through an eighth of the host's memory, weights up."""
    run = TrainingRun(8, 1, 4, precision=precision, offload="optimizer")
    count = stage_parameters(build(WIDER, run, A100), WIDER, run, 0).all
    host = A100.host
    assert host is not None
    link = host.link_bandwidth * host.link_efficiency
    passes = {"bf16": 40, "fp32": 32, "bf16-mixed": 32}[precision]
    times = parts(run)
    assert times["optimizer: gradients to the host"] == pytest.approx(host.link_latency_seconds + 4 * count / link)
    assert times["optimizer: weights from the host"] == pytest.approx(host.link_latency_seconds + weight * count / link)
    memory = host.memory_bandwidth * host.memory_efficiency / A100.devices_per_node
    assert times["optimizer: on the host"] == pytest.approx(passes * count / memory)
    on_host, here = (
        estimate(WIDER, run, A100),
        estimate(WIDER, replace(run, offload=""), A100),
    )
    assert on_host.memory.host == (4 + 4 + 8) * count and on_host.memory.optimizer == 0 < here.memory.optimizer
    assert on_host.memory.peak == here.memory.peak - here.memory.optimizer
    assert sum(seconds for _, seconds in on_host.parts) == pytest.approx(on_host.step_seconds) and here.memory.host == 0
    assert on_host.step_seconds > here.step_seconds
    assert on_host.band.steps == 0 and on_host.band.error >= 0.6  # nobody measured such a step


@pytest.mark.parametrize(("precision", "zero"), [("bf16", 1), ("bf16", 3), (FSDP, 3)])
def test_replicas_share_it(precision: str, zero: int) -> None:
    run = TrainingRun(8, 1, 4, precision=precision, zero=zero, offload="optimizer")
    count = stage_parameters(build(WIDER, run, A100), WIDER, run, 0).all
    assert estimate(WIDER, run, A100).memory.host == 16 * count / 4
    if precision == "bf16":
        whole = parts(replace(run, zero=0))["optimizer: on the host"]
        assert parts(run)["optimizer: on the host"] == pytest.approx(whole / 4)


def test_of_a_pipeline_the_fullest_host_counts() -> None:
    run = TrainingRun(8, 1, pp=4, stage_layers=(1, 1, 1, 1), offload="optimizer")
    built = build(WIDER, run, A100)
    most = max(stage_parameters(built, WIDER, run, stage).all for stage in range(4))
    assert estimate(WIDER, run, A100).memory.host == 16 * most


def test_a_host_has_an_end() -> None:
    assert A100.host is not None
    small = replace(
        A100,
        host=replace(A100.host, memory_bytes=2e9),
        text=A100.text + "# a small host",
    )
    run = TrainingRun(8, 1, offload="optimizer")
    on_host = estimate(WIDER, run, small)
    assert not on_host.memory.fits(small) and estimate(WIDER, run, A100).memory.fits(A100)
    fixed = {"tp": 1, "pp": 1, "recompute": "none", "micro_batch": 1, "zero": 0}
    with pytest.raises(InfeasibleError, match="of its host"):
        best_runs(RunSpace(WIDER, run, 2, fixed), small, 1)
    best = best_runs(RunSpace(WIDER, run, 2, fixed), A100, 1).best[0]
    assert best.memory.host > 0
    without = replace(A100, host=None, text=A100.text + "# no host")
    for refused in (
        lambda: estimate(WIDER, run, without),
        lambda: best_runs(RunSpace(WIDER, run, 2, fixed), without, 1),
    ):
        with pytest.raises(UsageError, match=r"has no \[host\]"):
            refused()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "sequence": 512, "vocabulary": 1000, "batch": 8, "dp": 4}
    words = ["estimate", "--hardware", "a100-80g-sxm", *(w for k, v in sizes.items() for w in (f"--{k}", str(v)))]
    assert main([*words, "--offload", "optimizer"]) == 0
    printed = capsys.readouterr().out
    assert "optimizer: on the host" in printed and "of its host: fits the" in printed
    assert main([*words, "--offload", "optimizer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"]["host"] > 0
    assert main([*words, "--offload", "weights"]) == 2


# --- linear layers in float8, as priced: their products, their casts, and what stays as it was ---


LLAMA = Transformer(8, 8192, 64, 4096, 32000, 8, 28672, "swiglu", "flash", "rotary", "rms_norm", False, False)


def linear(rows: int, inputs: int, outputs: int, target: str, gradient: bool = True) -> LocalOp:
    x, weight, out = (
        LocalTensor(shape, "bfloat16", gradient) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    return LocalOp(target, (x, weight, None), (out,))


def test_a_shard_that_the_kernels_take() -> None:
    """Of a large product three quarters of the time at most; of a small one the casts are more than what is gained."""
    times = {}
    for rows, width in ((32768, 8192), (1024, 512)):
        plain, narrow = (
            local_op_seconds(H100, linear(rows, width, 4 * width, t))
            for t in ("aten.linear", "autoshard.float8_linear")
        )
        times[rows] = [seconds / other for seconds, other in zip(narrow, plain, strict=True)]
    assert all(0.5 < ratio < 0.75 for ratio in times[32768]) and all(ratio > 1 for ratio in times[1024])


@pytest.mark.parametrize("rows, inputs, outputs", [(1000, 512, 512), (1024, 520, 512), (1024, 512, 520)])
def test_a_shard_that_they_do_not_take_runs_in_bfloat16(rows: int, inputs: int, outputs: int) -> None:
    sizes = rows, inputs, outputs
    plain, narrow = (linear(*sizes, target) for target in ("aten.linear", "autoshard.float8_linear"))
    assert local_op_seconds(H100, plain) == local_op_seconds(H100, narrow)
    assert gradient_cast_seconds(H100, narrow) == 0 < gradient_cast_seconds(H100, linear(*[512] * 3, narrow.target))


def test_a_weight_in_the_other_order_is_turned_in_the_other_direction() -> None:
    """Once a step either way."""
    x, weight, out = (LocalTensor((4096, 4096), "bfloat16", True) for _ in range(3))
    out_in, in_out = (
        local_op_seconds(H100, LocalOp(f"autoshard.float8_linear{end}", (x, weight, None), (out,)))
        for end in ("", "_in_out")
    )
    assert in_out[0] > out_in[0] and in_out[1] < out_in[1] and sum(in_out) == pytest.approx(sum(out_in))


@pytest.mark.parametrize("tp", quick_at([1, 4], 0))
def test_a_step(tp: int) -> None:
    """Of 32768 rows layers are faster, head and embedding as they were, and nothing is kept that was not."""
    plain, narrow = (
        TrainingRun(16, 8, tp=tp, sequence_parallel=tp > 1, precision=p) for p in ("bf16-mixed", "fp8-mixed")
    )
    builds = [build(LLAMA, run, H100) for run in (plain, narrow)]
    targets = [[i.target for i in built.program.instructions if isinstance(i, Compute)] for built in builds]
    narrowed = sum(target == "autoshard.float8_linear" for target in targets[1])
    assert narrowed == 14 and targets[1].count("aten.linear") == 1 == targets[0].count("aten.linear") - narrowed
    before, after = (pieces(built, H100) for built in builds)
    for one, other in ((before.head, after.head), (before.embedding, after.embedding)):
        assert one.forward_seconds == pytest.approx(other.forward_seconds)
        assert one.backward_seconds == pytest.approx(other.backward_seconds)
    most = {1: 0.8, 4: 0.95}[tp]  # all cast the whole input, for a part of the product
    assert after.layer.forward_seconds < most * before.layer.forward_seconds
    assert after.layer.backward_seconds < most * before.layer.backward_seconds
    assert before.layer.forward_communication_seconds == pytest.approx(after.layer.forward_communication_seconds)
    steps = [estimate(LLAMA, run, H100) for run in (plain, narrow)]
    assert steps[0].memory.activations == steps[1].memory.activations and steps[0].flops == steps[1].flops
    assert steps[1].band.steps == 0  # of steps in float8 no band was made


def test_fsdp_gathers_what_it_did() -> None:
    plain, narrow = (TrainingRun(128, 8, dp=16, zero=3, overlap=True, precision=p) for p in ("bf16-fsdp", "fp8-fsdp"))
    before, after = (dict(estimate(LLAMA, run, H100).parts) for run in (plain, narrow))
    assert after["optimizer"] == before["optimizer"]
    assert estimate(LLAMA, narrow, H100).step_seconds < estimate(LLAMA, plain, H100).step_seconds
    assert estimate(LLAMA, narrow, H100).memory.weights == estimate(LLAMA, plain, H100).memory.weights


def test_experts_stay_in_bfloat16() -> None:
    model = replace(LLAMA, hidden=1024, heads=16, experts=16)
    built = build(model, TrainingRun(4, 1, precision="fp8-mixed"), H100)
    targets = [(i.module.split(".")[2:3], i.target) for i in built.program.instructions if isinstance(i, Compute)]
    narrow = [module for module, target in targets if target == "autoshard.float8_linear"]
    assert narrow == [["attention"]] * 8
    assert sum(target == "aten.linear" for _, target in targets) == 3  # two routers, the head


def test_a_device_without_float8(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "sequence": 4096, "vocabulary": 1000, "batch": 4}
    words = [w for k, v in sizes.items() for w in (f"--{k}", str(v))]
    for hardware, code in (("a100-80g-sxm", 2), ("h100-80g-sxm", 0)):
        assert main(["estimate", "--hardware", hardware, *words, "--precision", "fp8-mixed"]) == code
    printed = capsys.readouterr().err
    assert "--precision fp8-mixed: a100-80g-sxm has no float8" in printed and "--precision bf16-mixed" in printed
