"""Published steps of other clusters and devices beside `autoshard estimate`: BLOOM's plans, B200, H100, Ascend.

Nothing is fitted to a whole step here, but where a table says so: then to half of its models, and judged on the others.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from autoshard.calibrate import Products, Rows
from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.costs.compute import ATTENTION_BACKWARD_FLOPS, one_attention_seconds
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.whole_steps.software import tables as software_tables
from benchmarks.bloom_steps import BLOOM_VOCABULARY, SEQUENCE, bloom_plans
from benchmarks.measurements import read
from benchmarks.steps import (
    EAGER,
    GIB,
    Floats,
    NamedRow,
    errors,
    percent,
    predicted_of,
    ranking,
    seconds_of,
    step_table,
)

# --- B200 -------------------------------------------------------------------------------------------------------------

CORE = "megatron-core"
LLAMA_VOCABULARY = 128_256
LLAMA = {70: (8192, 64, 28672), 405: (16384, 128, 53248)}  # hidden, heads, feed-forward
CASE = re.compile(r"llama3_(\d+)b_l(\d+)_tp(\d+)(?:_cp(\d+))?_pp(\d+)_dp(\d+)(?:_seq(\d+))?_mbc(\d+)_cef$")
B200_KERNELS = "b200_bf16_ceperm"
CALIBRATION_KERNELS, CALIBRATION_ATTENTIONS, KERNEL_DRAWS = 20, 5, 10


@lru_cache(maxsize=4)
def b200(data: Path) -> tuple[NamedRow, ...]:
    """The dense rows: those with experts are of DeepSeek, whose latent attention `estimate` does not describe."""
    hardware, found = load_hardware("b200-180g-sxm"), []
    for raw in read(data / "simumax_b200_steps.csv"):
        known = CASE.match(raw["case"])
        if not known:
            continue
        size, layers, tp, cp, pp, dp, length, micro_batches = (int(group or 0) for group in known.groups())
        hidden, heads, inner = LLAMA[size]
        model = Transformer(
            layers, hidden, heads, length or 4096, LLAMA_VOCABULARY, 8, inner, "swiglu", "flash", "rotary", "rms_norm",
            bias=False, tied=False, fused_loss=True,
        )  # fmt: skip
        run = TrainingRun(
            micro_batches * dp, 1, dp, tp, pp, zero=1, sequence_parallel=tp > 1, reduced="fp32", cp=cp or 1,
            software=CORE,
        )  # fmt: skip
        workload = (size, micro_batches, length)
        memory = float(raw["measured_peak_gib"])
        seconds = float(raw["measured_ms"]) * 1e-3
        found.append(NamedRow(model, run, seconds, workload, f"Llama 3 {size}B", hardware, memory))
    return tuple(found)


def kernel_ratios(data: Path) -> Floats:
    """Measured seconds of that host's products over those of the shipped constants, forward and backward."""
    hardware = load_hardware("b200-180g-sxm")
    model = Products(hardware.peak_flops("bfloat16"), hardware.memory_bandwidth)
    constants = {free.key: hardware.constant(f"matmul.{free.key}") for free in model.free}
    found = []
    for row in read(data / "kernel_efficiency.csv"):
        if (row["system"], row["op"]) != (B200_KERNELS, "matmul"):
            continue
        shape = dict(part.split("=") for part in row["shape"].split(", "))
        sizes: Rows = {key: np.array([float(shape[key])]) for key in "mnk"} | {"item_bytes": np.array([2.0])}
        flops = 2 * float(np.prod([sizes[key] for key in "mnk"]))
        seconds = flops / (float(row["efficiency"]) * float(row["peak_tflops"]) * 1e12)
        found.append(seconds / float(model.seconds(constants, sizes)[0]))
    return np.array(found)


def attention_ratios(data: Path) -> Floats:
    """The same of causal attention, forward and backward; the source counts the scores above the diagonal, too."""
    hardware = load_hardware("b200-180g-sxm")
    relative, found = hardware.constant("attention.backward"), []
    for row in read(data / "kernel_efficiency.csv"):
        if row["system"] != B200_KERNELS or not row["op"].startswith("sdp"):
            continue
        shape = dict(part.split("=") for part in row["shape"].split(", "))
        batch, length, heads, groups, head, value = (
            int(shape[key]) for key in ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
        )
        way, size = (ATTENTION_BACKWARD_FLOPS, 2.0) if row["op"] == "sdp_bwd" else (1.0, 1.0)
        flops = way * 2.0 * batch * heads * length**2 * (head + value)
        seconds = flops / (float(row["efficiency"]) * float(row["peak_tflops"]) * 1e12)
        traffic = size * 2 * batch * length * (heads * (head + value) + groups * (head + value))
        work = flops / 2 / (relative if way > 1 else 1.0)
        found.append(seconds / one_attention_seconds(hardware, "bfloat16", work, way * length, head, traffic))
    return np.array(found)


@lru_cache(maxsize=64)
def calibrated_b200(data: Path, seed: int) -> Hardware:
    """The rates of products and of attention as 20 kernels of that host have them, drawn by seed: medians."""
    source = np.random.default_rng(seed)
    hardware = load_hardware("b200-180g-sxm")
    changed = dict(hardware.constants)
    for name, ratios, count in (
        ("matmul", kernel_ratios(data), CALIBRATION_KERNELS - CALIBRATION_ATTENTIONS),
        ("attention", attention_ratios(data), CALIBRATION_ATTENTIONS),
    ):
        changed[f"{name}.compute"] /= float(np.median(ratios[source.permutation(len(ratios))[:count]]))
    return replace(hardware, constants=tuple(changed.items()))


def b200_steps(data: Path) -> list[str]:
    """As shipped, and with 20 kernels of that host; peak memory beside."""
    rows = b200(data)
    plain = errors(rows, seconds_of(rows))
    draws = [
        errors(rows, seconds_of([replace(r, hardware=calibrated_b200(data, seed)) for r in rows]))
        for seed in range(KERNEL_DRAWS)
    ]
    own = np.mean(draws, axis=0)
    lines = [
        f"| run | micro-batches | measured ms | as shipped | {CALIBRATION_KERNELS} kernels | peak GiB | error |",
        "|---|---|---|---|---|--:|--:|",
    ]
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        run = row.run
        shared = f"cp {run.cp}, {row.model.sequence} tokens" if run.cp > 1 else f"pp {run.pp}"
        groups.setdefault(f"{row.name}, {row.model.layers} layers, tp {run.tp} {shared}", []).append(place)
    for name, at in groups.items():
        peak, made = rows[at[0]].memory_gb, predicted_of(rows[at[0]]).memory.peak / GIB
        counts = ", ".join(str(rows[i].run.micro_batches) for i in at)
        seconds = ", ".join(f"{rows[i].measured_seconds * 1e3:.0f}" for i in at)
        each = (", ".join(f"{found[i]:+.0%}" for i in at) for found in (plain, own))
        lines.append(f"| {name} | {counts} | {seconds} | {' | '.join(each)} | {peak:.1f} | {made / peak - 1:+.1%} |")
    spread = np.array([np.abs(draw).mean() for draw in draws])
    memory = np.array([
        predicted_of(r).memory.peak / GIB / r.memory_gb - 1 for r in rows
    ])  # fmt: skip
    ranks = [ranking(rows, seconds_of(rows))] if len({r.workload for r in rows}) < len(rows) / 2 else []
    order = f" Rank correlation of workloads with three splits {ranks[0].correlation:.2f}." if ranks else ""
    return [
        *lines,
        "",
        f"Mean error as shipped {percent(plain)}; with {CALIBRATION_KERNELS} kernels {spread.mean():.1%} "
        f"({spread.min():.1%} to {spread.max():.1%} over the draws). Peak memory {np.abs(memory).mean():.1%}.{order}",
    ]


# --- H100 -------------------------------------------------------------------------------------------------------------

# Megatron-LM's README, weak scaling on H100: layers, hidden, heads, TP, PP, DP, batch, TFLOP/s a GPU. bf16, sequence
# 4096, vocabulary 131,072; reductions and gathers overlap. The micro-batch is not published: 1 is assumed.
MEGATRON_CORE = {
    "1.7B": (24, 2048, 16, 1, 1, 48, 192, 408.8),
    "16B": (32, 6144, 48, 4, 1, 48, 192, 489.1),
    "70B": (84, 8192, 64, 8, 2, 48, 384, 419.7),
    "177B": (96, 12288, 96, 8, 6, 48, 1152, 432.8),
    "462B": (112, 18432, 144, 8, 16, 48, 3072, 459.9),
}


@lru_cache(maxsize=1)
def megatron_core() -> tuple[NamedRow, ...]:
    """Step seconds from Megatron's own formula of FLOPs."""
    hardware, found = load_hardware("h100-80g-sxm"), []
    for name, (layers, hidden, heads, tp, pp, dp, batch, rate) in MEGATRON_CORE.items():
        model = Transformer(layers, hidden, heads, 4096, 131_072, tied=False, fused_loss=True)
        run = TrainingRun(batch, 1, dp, tp, pp, zero=1, sequence_parallel=tp > 1, overlap=True, reduced="fp32",
                          software=CORE)  # fmt: skip
        tokens = batch * model.sequence
        flops = 72 * tokens * layers * hidden**2 * (
            1 + model.sequence / (6 * hidden) + model.vocabulary / (12 * hidden * layers)
        )  # fmt: skip
        found.append(NamedRow(model, run, flops / (rate * 1e12 * run.devices), (name,), name, hardware))
    return tuple(found)


def hopper_steps(data: Path) -> list[str]:
    rows = megatron_core()
    seconds = seconds_of(rows)
    lines = step_table([(row.name, row) for row in rows], seconds)
    return [*lines, "", f"Error {percent(errors(rows, seconds))} (mean, median, bias)."]


# --- Ascend -----------------------------------------------------------------------------------------------------------

# Layers, hidden, feed-forward, heads, KV heads, vocabulary, sequence, TP, PP, micro-batch, batch, precision, attention,
# tokens/s a device; DP 1, sequence parallel, nothing computed again. MindSpeed-LLM 1.0.RC1 on an Atlas 900 A2 PODc.
MINDSPEED = {
    "Aquila 7B": (32, 4096, 11008, 32, 32, 100_008, 2048, 8, 1, 8, 64, "bf16", "flash", 2849),
    "Baichuan 13B": (40, 5120, 13696, 40, 40, 64_000, 4096, 8, 1, 1, 32, "fp16", "unfused", 1213),
    "Baichuan2 13B": (40, 5120, 13696, 40, 40, 125_696, 4096, 8, 1, 1, 8, "fp16", "unfused", 1310),
    "InternLM 65B": (80, 8192, 22016, 64, 64, 103_168, 2048, 8, 4, 2, 256, "bf16", "flash", 341),
    "LLaMA 13B": (40, 5120, 13824, 40, 40, 32_000, 2048, 1, 8, 1, 128, "fp16", "flash", 1895),
    "LLaMA 65B": (80, 8192, 22016, 64, 64, 32_000, 2048, 8, 4, 2, 128, "bf16", "flash", 348),
    "LLaMA2 13B": (40, 5120, 13824, 40, 40, 32_000, 4096, 8, 1, 2, 16, "bf16", "flash", 1550),
    "LLaMA2 70B": (80, 8192, 28672, 64, 8, 32_000, 4096, 8, 8, 2, 1024, "bf16", "flash", 350),
    "Qwen 14B": (40, 5120, 13696, 40, 40, 151_936, 2048, 8, 1, 4, 64, "bf16", "flash", 1560),
}
# The same release: every block computed again, attention unfused, 70 layers on 12 stages.
MINDSPEED_BLOOM = (
    Transformer(70, 14336, 112, SEQUENCE, BLOOM_VOCABULARY, attention="unfused"),
    TrainingRun(2048, 2, 1, 8, 12, recompute="full", sequence_parallel=True),
    100,
)
# MindFormers r1.0 on 8 Ascend 910A, full recomputation, optimizer sharded, fp16; tokens/s a device.
MINDFORMERS = {
    "PanGu-alpha 2.6B": (
        Transformer(32, 2560, 32, 1024, 40_000, **EAGER),  # type: ignore[arg-type]
        TrainingRun(128, 16, 8, recompute="full", zero=1, precision="fp16"),
        4075,
    ),
    "BLOOM 7.1B": (
        Transformer(30, 4096, 32, SEQUENCE, BLOOM_VOCABULARY, **EAGER),  # type: ignore[arg-type]
        TrainingRun(64, 4, 1, 4, 2, recompute="full", zero=1, precision="fp16"),
        1063,
    ),
}
ASCEND_FITTED = {  # the models that `sustained` is fitted to: every second one of a device
    "ascend-910b2": tuple(MINDSPEED)[::2],
    "ascend-910a": tuple(MINDFORMERS)[::2],
}
ASCEND_SOFTWARE = "mindspeed"


@lru_cache(maxsize=4)
def ascend(software: str = ASCEND_SOFTWARE) -> tuple[NamedRow, ...]:
    found = []
    for name, row in MINDSPEED.items():
        layers, hidden, inner, heads, kv, words, length, tp, pp, micro, batch, precision, attention, tokens = row
        model = Transformer(
            layers, hidden, heads, length, words, kv, inner, "swiglu", attention, "rotary", "rms_norm", False, False
        )  # fmt: skip
        run = TrainingRun(batch, micro, 1, tp, pp, sequence_parallel=tp > 1, precision=precision, software=software)
        found.append(_ascend_row(name, "ascend-910b2", model, run, tokens))
    model, run, tokens = MINDSPEED_BLOOM
    found.append(_ascend_row("Bloom 176B", "ascend-910b2", model, replace(run, software=software), tokens))
    for name, (model, run, tokens) in MINDFORMERS.items():
        found.append(_ascend_row(name, "ascend-910a", model, replace(run, software=software), tokens))
    return tuple(found)


def _ascend_row(name: str, profile: str, model: Transformer, run: TrainingRun, tokens: int) -> NamedRow:
    seconds = run.batch * model.sequence / tokens / run.devices
    return NamedRow(model, run, seconds, (name,), name, load_hardware(profile))


def is_fitted(row: NamedRow) -> bool:
    """Whether the rate of products was fitted to it."""
    return row.name in ASCEND_FITTED[row.hardware.name]


def ascend_steps(data: Path) -> list[str]:
    """As uncalibrated, and with one number a device fitted to half of the models."""
    own, plain = ascend(), ascend("kernels")
    there, here = errors(own, seconds_of(own)), errors(plain, seconds_of(plain))
    lines = [
        "| run | profile | measured s | uncalibrated | mindspeed | |",
        "|---|---|--:|--:|--:|---|",
    ]
    for row, a, b in zip(own, here, there, strict=True):
        word = "fitted" if is_fitted(row) else "**held out**"
        lines.append(
            f"| {row.name} | {row.hardware.name} | {row.measured_seconds:.2f} | {a:+.1%} | {b:+.1%} | {word} |"
        )
    found = []
    for profile in ASCEND_FITTED:
        at = np.array([row.hardware.name == profile for row in own])
        out = at & np.array([not is_fitted(row) for row in own])
        found.append(f"{profile}: uncalibrated {percent(here[at])}; held out {percent(there[out])} ({out.sum()} rows).")
    known = software_tables()["software"][ASCEND_SOFTWARE]["products"]
    rates = ", ".join(f"{device} {figure['value']:.2f}" for device, figure in known.items())
    return [*lines, "", *found, f"The fitted rates of products: {rates}."]


TABLES = {
    "BLOOM's plans": bloom_plans,
    "Megatron-Core on eight B200": b200_steps,
    "Megatron-Core on H100": hopper_steps,
    "Ascend": ascend_steps,
}
