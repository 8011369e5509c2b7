"""Published runs that ran fit the devices that they ran on, and what decides that, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.stage_memory import StageMemory
from autoshard.estimate.step_bound import fullest, program_of
from autoshard.estimate.transformer import TrainingRun, Transformer, check
from tests.slow import slow

H100 = load_hardware("h100-80g-sxm")
LLAMA = {"kv_heads": 8, "activation": "swiglu", "positions": "rotary", "norm": "rms_norm", "bias": False, "tied": False}
LLAMA_8B = Transformer(32, 4096, 32, 8192, 128_256, feedforward=14336, fused_loss=True, **LLAMA)  # type: ignore[arg-type]
LLAMA_70B = replace(LLAMA_8B, layers=80, hidden=8192, heads=64, feedforward=28672)
LLAMA_405B = replace(LLAMA_8B, layers=126, hidden=16384, heads=128, feedforward=53248)
NEMOTRON_15B = replace(
    LLAMA_8B, hidden=6144, heads=48, sequence=4096, vocabulary=256_000, feedforward=24576, activation="gelu",
    norm="layer_norm",
)  # fmt: skip
GROK = replace(
    LLAMA_8B, layers=64, hidden=6144, heads=48, vocabulary=131_072, feedforward=32768, experts=8, top_k=2,
)  # fmt: skip
CORE = {"zero": 1, "overlap": True, "reduced": "bf16", "precision": "bf16"}
# NVIDIA/dgxc-benchmarking v25.04.01 (Apache-2.0), README tables of each workload: what ran on H100 80GB.
RECIPES = {
    "Llama 3.1 8B on 8": (LLAMA_8B, TrainingRun(128, 1, 4, cp=2, **CORE)),  # type: ignore[arg-type]
    "Llama 3.1 405B on 512": (
        LLAMA_405B, TrainingRun(256, 1, 4, 8, 8, "interleaved", 8, sequence_parallel=True, cp=2, **CORE),  # type: ignore[arg-type]
    ),
    "Llama 3.1 405B, 30 layers on 64": (
        replace(LLAMA_405B, layers=30),
        TrainingRun(64, 1, 1, 8, 4, "interleaved", 8, sequence_parallel=True, cp=2, **CORE),  # type: ignore[arg-type]
    ),
    "Llama 3.1 70B on 128, FP8": (
        LLAMA_70B,
        TrainingRun(256, 1, 4, 4, 8, "interleaved", 5, sequence_parallel=True, **CORE | {"precision": "fp8"}),  # type: ignore[arg-type]
    ),
    "Nemotron 15B on 16": (NEMOTRON_15B, TrainingRun(64, 2, 8, 2, sequence_parallel=True, **CORE)),  # type: ignore[arg-type]
    "Grok-1 on 512": (
        GROK, TrainingRun(1024, 1, 8, 4, 8, "interleaved", 8, sequence_parallel=True, cp=2, ep=8, **CORE),  # type: ignore[arg-type]
    ),
}  # fmt: skip


def memory(model: Transformer, run: TrainingRun) -> StageMemory:
    check(model, run)
    return fullest(model, run, program_of(model, run, H100))


@pytest.mark.parametrize("software", [slow("kernels"), "megatron-core"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_ran_fits(name: str, software: str) -> None:
    model, run = RECIPES[name]
    assert memory(model, replace(run, software=software)).fits(H100)


def test_gradients_are_held_in_what_they_are_summed_in() -> None:
    """Megatron's buffers: two bytes a parameter with grad_reduce_in_fp32 off, four with it on."""
    model = replace(LLAMA_8B, layers=4, sequence=1024, vocabulary=32_000)
    low, wide = (memory(model, TrainingRun(8, 1, 4, zero=1, reduced=dtype)) for dtype in ("bf16", "fp32"))
    assert wide.gradients == 2 * low.gradients and low.gradients == pytest.approx(low.weights)
    plain = memory(model, TrainingRun(8, 1, 4, zero=1))
    assert plain == wide  # as before where nothing is said


def test_the_optimizer_widens_gradients_in_half_precision() -> None:
    """A step of few tokens is fullest when it begins: four bytes more of each parameter that the device updates."""
    model = replace(LLAMA_8B, layers=4, sequence=128, vocabulary=32_000)
    held = memory(model, TrainingRun(8, 1, 4, zero=1, reduced="bf16"))
    assert held.activations == 0 and held.working == pytest.approx(held.optimizer / 3)  # 4 bytes where 12 are


def test_a_fused_gate_keeps_what_it_reads() -> None:
    """Llama's layer by hand, in elements a token: norms' inputs and results, q, k, v, attention's result, gate and up,
    their product, all in bf16; statistics beside."""
    model = replace(LLAMA_8B, layers=8, sequence=1024)
    wide, inner = 4096, 14336
    some, more = (memory(replace(model, layers=n), TrainingRun(8, 1, 1)) for n in (8, 9))
    counted = 2 * 1024 * (4 * wide + (wide + 2 * wide // 4) + wide + 3 * inner)
    assert more.activations - some.activations == pytest.approx(counted, rel=0.01)


def test_the_inner_width_of_experts_is_shared_by_tensor_parallelism() -> None:
    """A layer's pairs of token and expert: rows and results whole, what lies between cut."""
    model = replace(GROK, layers=4, sequence=1024, hidden=1024, heads=8, feedforward=4096, vocabulary=8_000)
    run = TrainingRun(8, 1, 1, precision="bf16")
    by_tp = {}
    for tp in (1, 2, 4, 8):
        few, more = (
            memory(replace(model, layers=n), replace(run, tp=tp, sequence_parallel=tp > 1)).activations for n in (4, 5)
        )
        dense = replace(model, experts=0, top_k=0, feedforward=8)
        a, b = (
            memory(replace(dense, layers=n), replace(run, tp=tp, sequence_parallel=tp > 1)).activations for n in (4, 5)
        )
        by_tp[tp] = (more - few) - (b - a)
    pairs = 2 * 1024
    for tp, layer_bytes in by_tp.items():
        assert layer_bytes == pytest.approx(2 * pairs * (2 * 1024 + 3 * 4096 / tp), rel=0.05), tp


def test_what_is_measured_as_outside_is_not_left_room_for_twice() -> None:
    room = H100.usable_memory_bytes
    assert StageMemory(room, 0, 0, 0, 5e9, outside=5e9).fits(H100)
    assert not StageMemory(room, 0, 0, 0, 5e9).fits(H100)
    assert not StageMemory(room, 0, 0, 0, 9e9, outside=9e9).fits(H100)  # more than there is


DATA = Path(__file__).resolve().parents[3] / "shared" / "validation"


@pytest.mark.skipif(not DATA.is_dir(), reason="published measurements (../shared/validation) are not here")
@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
def test_every_run_of_the_tables_fits(large: bool) -> None:
    from benchmarks.published_rows import that_ran

    titles = [title for title in that_ran(DATA) if (title in ("MPT by FSDP", "Megatron-LM on A100")) == large]
    runs = [run for title in titles for run in that_ran(DATA)[title]]
    memories = [fullest(run.model, run.run, program_of(run.model, run.run, run.hardware)) for run in runs]
    assert len(runs) >= 190
    assert not [run.name for run, held in zip(runs, memories, strict=True) if not held.fits(run.hardware)]
