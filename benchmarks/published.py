"""Single published rows, seconds and bytes, beside what `autoshard estimate` predicts: nothing is fitted on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.shown.reserved_memory import reserved_memory
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.state_bytes import STATE_BYTES
from autoshard.estimate.step import parameter_count
from autoshard.estimate.transformer import FP8_FSDP, Schedule, TrainingRun, Transformer
from benchmarks.steps import EAGER, GIB, VOCABULARY, Row, host_of, predict, predicted, step_table

# Korthikanti et al. 2022 (arXiv:2205.05198), table 5: layers, hidden, heads, PP, interleave, micro-batch, batch,
# seconds with full recomputation, seconds with sequence parallelism and selective recomputation. TP 8, DP 1, A100-80GB.
SELECTIVE = {
    "22B": (48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    "530B": (105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83),
}


# Narayanan et al. 2021 (arXiv:2104.04473), table 1, full recomputation: layers, hidden, heads, TP, PP, interleave, DP,
# micro-batch, batch, seconds (derived there from TFLOP/s).
SCALING = {
    "1.7B": (24, 2304, 24, 1, 1, 1, 32, 16, 512, 3.53),
    "7.5B": (36, 4096, 32, 4, 1, 1, 32, 16, 512, 3.70),
    "39.1B": (48, 8192, 64, 8, 2, 1, 32, 4, 1536, 14.45),
    "145.6B": (80, 12288, 96, 8, 8, 2, 24, 2, 2304, 24.82),
    "529.6B": (105, 20480, 128, 8, 35, 3, 9, 1, 2520, 54.08),
}


def _schedule(chunks: int) -> Schedule:
    return "interleaved" if chunks > 1 else "1f1b"


def scaling_rows() -> list[tuple[str, Row]]:
    """Narayanan et al., with their names."""
    found = []
    for name, (layers, hidden, heads, tp, pp, chunks, dp, micro, batch, seconds) in SCALING.items():
        model = Transformer(layers, hidden, heads, 2048, VOCABULARY, **EAGER)  # type: ignore[arg-type]
        run = TrainingRun(batch, micro, dp, tp, pp, _schedule(chunks), chunks, "full")
        found.append((name, Row(model, run, seconds, (name,))))
    return found


def selective_rows() -> list[tuple[str, Row]]:
    """Korthikanti et al., each run both ways."""
    found = []
    for name, (layers, hidden, heads, pp, chunks, micro, batch, full, lean) in SELECTIVE.items():
        model = Transformer(layers, hidden, heads, 2048, VOCABULARY, **EAGER)  # type: ignore[arg-type]
        run = TrainingRun(batch, micro, 1, 8, pp, _schedule(chunks), chunks, "full")
        less = replace(run, recompute="selective", sequence_parallel=True)
        found.append((f"{name}, full recomputation", Row(model, run, full, (name,))))
        found.append((f"{name}, selective, sequence parallel", Row(model, less, lean, (name,))))
    return found


def megatron_rows() -> list[Row]:
    """Of both papers."""
    return [row for _, row in (*scaling_rows(), *selective_rows())]


def scaling(data: Path) -> list[str]:
    """Single rows, nothing fitted."""
    return _with_profile(scaling_rows())


def megatron(data: Path) -> list[str]:
    """Single rows, nothing fitted."""
    return _with_profile(selective_rows())


def _with_profile(rows: list[tuple[str, Row]]) -> list[str]:
    hardware = load_hardware("a100-80g-sxm")
    return step_table(rows, predict([row for _, row in rows], hardware, host_of(hardware)))


# The same, figure 1: GiB of weights, gradients and optimizer; of activations, nothing computed again; of activations
# with sequence parallelism and selective recomputation.
FIGURE_1 = {"22B": (45.5625, 59.25, 9.5625), "530B": (31.64, 114.02, 23.08)}


def memory(data: Path) -> list[str]:
    """Published bytes of a device (the paper's arithmetic, not measured); states are a mean over stages."""
    hardware = load_hardware("a100-80g-sxm")
    lines = [
        "| model | what | published | predicted | error |",
        "|---|---|--:|--:|--:|",
    ]
    for name, published in FIGURE_1.items():
        layers, hidden, heads, pp, chunks, micro, batch, *_ = SELECTIVE[name]
        model = Transformer(layers, hidden, heads, 2048, VOCABULARY, **EAGER)  # type: ignore[arg-type]
        run = TrainingRun(batch, micro, 1, 8, pp, "interleaved" if chunks > 1 else "1f1b", chunks)
        plain = predicted(model, run, hardware, Host()).memory
        lean = replace(run, recompute="selective", sequence_parallel=True)
        made = (
            parameter_count(model) / 8 / pp * sum(STATE_BYTES[run.precision]),
            plain.activations,
            predicted(model, lean, hardware, Host()).memory.activations,
        )
        kinds = ("weights, gradients, optimizer", "activations", "activations, selective and sequence parallel")
        for kind, own, other in zip(kinds, made, published, strict=True):
            gib = own / GIB
            lines.append(f"| {name} | {kind} | {other:.2f} | {gib:.2f} | {gib / other - 1:+.1%} |")
    return lines


# torchtitan's benchmarks (Llama 3.1, H100, FSDP, full recomputation, fp8 and torch.compile): layers, hidden, heads, KV
# heads, feed-forward, sequence, batch of a replica, DP, TP, CP, GiB that the allocator had reserved at most.
TORCHTITAN = {
    "70B, FSDP 32 x TP 8": (80, 8192, 64, 8, 28672, 8192, 16, 32, 8, 1, 71.9),
    "8B, FSDP 8, 32768 tokens": (32, 4096, 32, 8, 14336, 32768, 1, 8, 1, 1, 83.9),
    "8B, FSDP 2 x CP 4, 131072 tokens": (32, 4096, 32, 8, 14336, 131072, 1, 2, 1, 4, 84.0),
}
LLAMA_VOCABULARY = 128_256


def reserved_by_allocator(data: Path) -> list[str]:
    """Nothing fitted."""
    hardware = load_hardware("h100-80g-sxm")
    lines = [
        "| run | measured | predicted, allocated | predicted, reserved | error |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, (layers, hidden, heads, kv, inner, sequence, batch, dp, tp, cp, gib) in TORCHTITAN.items():
        model = Transformer(
            layers, hidden, heads, sequence, LLAMA_VOCABULARY, kv, inner, "swiglu", "flash", "rotary", "rms_norm",
            bias=False, tied=False, fp32_loss=True,
        )  # fmt: skip
        run = TrainingRun(
            batch * dp, batch, dp, tp, recompute="full", zero=3, sequence_parallel=tp > 1, precision=FP8_FSDP,
            overlap=True, software="fsdp", cp=cp,
        )  # fmt: skip
        made = predicted(model, run, hardware, Host()).memory.peak / GIB
        taken = reserved_memory(model, run, hardware)
        assert taken is not None
        reserved = taken / GIB
        lines.append(f"| {name} | {gib:.1f} | {made:.1f} | {reserved:.1f} | {reserved / gib - 1:+.1%} |")
    return lines


# Megatron-LM's own tables of 2020 (images/tables.tex): layers, hidden, heads, TP, batch, profile, milliseconds; with
# sequences of 1024, activation checkpointing after every layer (Shoeybi et al. 2019).
WITHIN_A_NODE = (
    ("1B, V100", 24, 1920, 15, 1, 8, "v100-32g-sxm2", 1121),
    ("4B, V100, TP 4", 36, 3072, 24, 4, 8, "v100-32g-sxm2", 1238),
    ("1B, A100", 24, 1920, 15, 1, 16, "a100-80g-sxm", 1076),
    ("4B, A100, TP 4", 36, 3072, 24, 4, 16, "a100-80g-sxm", 1162),
)


def within_a_node(data: Path) -> list[str]:
    """Single rows, nothing fitted."""
    lines = [
        "| run | measured ms | predicted ms | error |",
        "|---|--:|--:|--:|",
    ]
    for name, layers, hidden, heads, tp, batch, profile, milliseconds in WITHIN_A_NODE:
        model = Transformer(layers, hidden, heads, 1024, VOCABULARY, **EAGER)  # type: ignore[arg-type]
        hardware, run = load_hardware(profile), TrainingRun(batch, batch, 1, tp, recompute="full", precision="fp16")
        made = predicted(model, run, hardware, host_of(hardware)).step_seconds * 1e3
        lines.append(f"| {name} | {milliseconds} | {made:.0f} | {made / milliseconds - 1:+.1%} |")
    return lines


TABLES = {
    "Weak scaling of Megatron-LM": scaling,
    "Training steps of Megatron-LM's models": megatron,
    "Tensor parallelism in one node": within_a_node,
    "Memory of Megatron-LM's models": memory,
    "Memory that was reserved": reserved_by_allocator,
}
