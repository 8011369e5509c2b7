"""Linear layers in float8, as priced: their products, their casts, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.costs.compute import gradient_cast_seconds, local_op_seconds
from autoshard.estimate.pieces import pieces
from autoshard.estimate.step import estimate
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_program import build
from autoshard.ir.local_op import LocalOp, LocalTensor
from autoshard.ir.program import Compute

H100 = load_hardware("h100-80g-sxm")
LLAMA = Transformer(8, 8192, 64, 4096, 32000, 8, 28672, "swiglu", "flash", "rotary", "rms_norm", False, False)


def linear(rows: int, inputs: int, outputs: int, target: str, gradient: bool = True) -> LocalOp:
    x, weight, made = (
        LocalTensor(shape, "bfloat16", gradient) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    return LocalOp(target, (x, weight, None), (made,))


def test_a_shard_that_the_kernels_take() -> None:
    """Of a large product three quarters of the time at most; of a small one the casts are more than what is gained."""
    times = {}
    for rows, width in ((32768, 8192), (1024, 512)):
        plain, narrow = (
            local_op_seconds(H100, linear(rows, width, 4 * width, t))
            for t in ("aten.linear", "autoshard.float8_linear")
        )
        times[rows] = [own / other for own, other in zip(narrow, plain, strict=True)]
    assert all(0.5 < ratio < 0.75 for ratio in times[32768]) and all(ratio > 1 for ratio in times[1024])


@pytest.mark.parametrize("rows, inputs, outputs", [(1000, 512, 512), (1024, 520, 512), (1024, 512, 520)])
def test_a_shard_that_they_do_not_take_runs_in_bfloat16(rows: int, inputs: int, outputs: int) -> None:
    sizes = rows, inputs, outputs
    plain, narrow = (linear(*sizes, target) for target in ("aten.linear", "autoshard.float8_linear"))
    assert local_op_seconds(H100, plain) == local_op_seconds(H100, narrow)
    assert gradient_cast_seconds(H100, narrow) == 0 < gradient_cast_seconds(H100, linear(*[512] * 3, narrow.target))


def test_a_weight_in_the_other_order_is_turned_in_the_other_direction() -> None:
    """Once a step either way."""
    x, weight, made = (LocalTensor((4096, 4096), "bfloat16", True) for _ in range(3))
    out_in, in_out = (
        local_op_seconds(H100, LocalOp(f"autoshard.float8_linear{end}", (x, weight, None), (made,)))
        for end in ("", "_in_out")
    )
    assert in_out[0] > out_in[0] and in_out[1] < out_in[1] and sum(in_out) == pytest.approx(sum(out_in))


@pytest.mark.parametrize("tp", [1, 4])
def test_a_step(tp: int) -> None:
    """Of 32768 rows layers are faster, head and embedding as they were, and nothing is kept that was not."""
    plain, narrow = (
        TrainingRun(16, 8, tp=tp, sequence_parallel=tp > 1, precision=p) for p in ("bf16-mixed", "fp8-mixed")
    )
    made = [build(LLAMA, run, H100) for run in (plain, narrow)]
    targets = [[i.target for i in built.program.instructions if isinstance(i, Compute)] for built in made]
    narrowed = sum(target == "autoshard.float8_linear" for target in targets[1])
    assert narrowed == 14 and targets[1].count("aten.linear") == 1 == targets[0].count("aten.linear") - narrowed
    before, after = (pieces(built, H100) for built in made)
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
    found = [(i.module.split(".")[2:3], i.target) for i in built.program.instructions if isinstance(i, Compute)]
    narrow = [module for module, target in found if target == "autoshard.float8_linear"]
    assert narrow == [["attention"]] * 8
    assert sum(target == "aten.linear" for _, target in found) == 3  # two routers, the head


def test_a_device_without_float8(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "sequence": 4096, "vocabulary": 1000, "batch": 4}
    given = [w for k, v in sizes.items() for w in (f"--{k}", str(v))]
    for hardware, code in (("a100-80g-sxm", 2), ("h100-80g-sxm", 0)):
        assert main(["estimate", "--hardware", hardware, *given, "--precision", "fp8-mixed"]) == code
    told = capsys.readouterr().err
    assert "--precision fp8-mixed: a100-80g-sxm has no float8" in told and "--precision bf16-mixed" in told
