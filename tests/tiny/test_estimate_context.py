"""`autoshard estimate` with context parallelism: devices that share every sequence, in the Program and the step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autoshard.cli.commands import main
from autoshard.cluster.hardware import load_hardware
from autoshard.errors import UsageError
from autoshard.estimate.gradient_sync import syncs
from autoshard.estimate.pieces import pieces
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import estimate
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_program import build
from autoshard.ir.program import Collective, Compute
from autoshard.simulation import simulate

H100 = load_hardware("h100-80g-sxm")
LLAMA = Transformer(4, 2048, 16, 16384, 8000, 4, 5632, "swiglu", "flash", "rotary", "rms_norm", False, False)


def run(cp: int, **rest: object) -> TrainingRun:
    return replace(TrainingRun(4, 1, cp=cp), **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_communicates_by_its_ring_alone(tp: int) -> None:
    """Every other operator works on its own part of the sequence: nothing but weights moves over the axis."""
    built = build(LLAMA, run(4, tp=tp, sequence_parallel=tp > 1), H100)
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
    one, four = (pieces(build(LLAMA, run(cp), H100), H100).layer for cp in (1, 4))
    for alone, shared in (
        (one.forward_seconds, four.forward_seconds - four.forward_communication_seconds),
        (one.backward_seconds, four.backward_seconds - four.backward_communication_seconds),
    ):
        assert alone / 4 <= shared <= alone / 3
    whole, part = (estimate(LLAMA, run(cp), H100, Host()) for cp in (1, 4))
    assert part.memory.activations == pytest.approx(whole.memory.activations / 4, rel=0.02)
    assert part.memory.weights == whole.memory.weights
    assert whole.step_seconds / 4 < part.step_seconds < whole.step_seconds / 2


def test_they_reduce_gradients_and_share_optimizer_states() -> None:
    """As replicas do: Megatron-Core's distributed optimizer cuts over both."""
    built = build(LLAMA, run(2, dp=2), H100)
    alike = build(LLAMA, run(1, dp=4), H100)
    one, other = (syncs(b, r, H100).layer for b, r in ((built, run(2, dp=2)), (alike, run(1, dp=4))))
    assert one == other and one.reduce_seconds > 0
    sharded, whole = (estimate(LLAMA, run(4, zero=zero), H100).memory.optimizer for zero in (1, 0))
    assert sharded == pytest.approx(whole / 4)


def test_what_can_not_be_shared_is_named() -> None:
    with pytest.raises(UsageError, match="cp 3 does not divide the sequence 16384"):
        estimate(LLAMA, run(3), H100)
    with pytest.raises(UsageError, match=r"cp 2 x tp 2 does not divide the sequence 1026"):
        estimate(replace(LLAMA, sequence=1026), run(2, tp=2, sequence_parallel=True), H100)
    with pytest.raises(UsageError, match=r"context parallelism \(cp 2\) needs a fused attention, got unfused"):
        estimate(replace(LLAMA, attention="unfused"), run(2), H100)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "sequence": 4096, "vocabulary": 1000, "batch": 4, "cp": 2, "tp": 2}
    words = ["estimate", "--hardware", "h100-80g-sxm", *(w for k, v in sizes.items() for w in (f"--{k}", str(v)))]
    assert main(words) == 0
    assert "dp=1,cp=2,tp=2,pp=1 (4 devices)" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == 4
    assert main([*words, "--search", "--devices", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(r["run"]["cp"], r["run"]["tp"]) for r in found["best"]} == {(2, 2)}
    assert {r["run"]["dp"] * r["run"]["pp"] for r in found["best"]} == {2}
