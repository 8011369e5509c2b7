"""Tables of published steps and bytes beside what `autoshard estimate` predicts: Megatron, FSDP, Ascend, float8.

Nothing is fitted to a whole step here, but where a table says so: then to half of its models, and judged on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from autoshard.calibrate import Products
from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.costs import collective_seconds
from autoshard.costs.compute import ATTENTION_BACKWARD_FLOPS, one_attention_seconds
from autoshard.estimate.shown.reserved_memory import reserved_memory
from autoshard.estimate.state_bytes import STATE_BYTES
from autoshard.estimate.step import parameter_count
from autoshard.estimate.transformer import FP8_FSDP, FSDP
from autoshard.ir.mesh import Mesh
from autoshard.whole_steps.software import tables as software_tables
from benchmarks.measurements import kernels, sizes_of
from benchmarks.published_rows import (
    ASCEND,
    FSDP_SOFTWARE,
    GENERATIONS,
    GPUS,
    MACHINES,
    Step,
    ascend,
    b200,
    fsdp_runs,
    is_known,
    mpt,
    mpt_float8,
    published,
)
from benchmarks.steps import (
    GIB,
    Floats,
    errors,
    percent,
    predicted_of,
    ranking,
    seconds_of,
    step_table,
    table,
)

# --- Megatron-LM's papers ---------------------------------------------------------------------------------------------

# Korthikanti et al. 2022, figure 1: GiB of weights, gradients and optimizer; of activations, nothing computed again; of
# activations with sequence parallelism and selective recomputation.
FIGURE_1 = {"22B": (45.5625, 59.25, 9.5625), "530B": (31.64, 114.02, 23.08)}


def scaling(data: Path) -> list[str]:
    return step_table(published("scaling"), seconds_of(published("scaling")))


def megatron(data: Path) -> list[str]:
    return step_table(published("selective"), seconds_of(published("selective")))


def within_a_node(data: Path) -> list[str]:
    lines = table("run", "measured ms", "predicted ms", "error")
    for row, seconds in zip(published("within_a_node"), seconds_of(published("within_a_node")), strict=True):
        made, real = seconds * 1e3, row.measured_seconds * 1e3
        lines.append(f"| {row.name} | {real:.0f} | {made:.0f} | {made / real - 1:+.1%} |")
    return lines


def memory(data: Path) -> list[str]:
    """Published bytes of a device (the paper's arithmetic, not measured); states are a mean over stages."""
    lines = table("model", "what", "published", "predicted", "error", words=2)
    kinds = ("weights, gradients, optimizer", "activations", "activations, selective and sequence parallel")
    full, lean = published("selective")[::2], published("selective")[1::2]
    for (name, real), whole, less in zip(FIGURE_1.items(), full, lean, strict=True):
        plain = replace(whole, run=replace(whole.run, recompute="none"))
        made = (
            parameter_count(plain.model) / 8 / plain.run.pp * sum(STATE_BYTES[plain.run.precision]),
            predicted_of(plain).memory.activations,
            predicted_of(less).memory.activations,
        )
        for kind, own, other in zip(kinds, made, real, strict=True):
            gib = own / GIB
            lines.append(f"| {name} | {kind} | {other:.2f} | {gib:.2f} | {gib / other - 1:+.1%} |")
    return lines


def reserved_by_allocator(data: Path) -> list[str]:
    lines = table("run", "measured", "predicted, allocated", "predicted, reserved", "error")
    for row in published("reserved"):
        taken = reserved_memory(row.model, row.run, row.hardware)
        assert taken is not None
        made, reserved, gib = predicted_of(row).memory.peak / GIB, taken / GIB, row.memory_gb
        lines.append(f"| {row.name} | {gib:.1f} | {made:.1f} | {reserved:.1f} | {reserved / gib - 1:+.1%} |")
    return lines


# --- Megatron-Core on B200 and H100 -----------------------------------------------------------------------------------

B200_KERNELS = "b200_bf16_ceperm"
CALIBRATION_KERNELS, CALIBRATION_ATTENTIONS, KERNEL_DRAWS = 20, 5, 10


def kernel_ratios(data: Path) -> Floats:
    """Measured seconds of that host's products over those of the shipped constants, forward and backward."""
    hardware = load_hardware(MACHINES["b200"])
    model = Products(hardware.peak_flops("bfloat16"), hardware.memory_bandwidth)
    constants = {free.key: hardware.constant(f"matmul.{free.key}") for free in model.free}
    found = []
    for shape, rate, _ in kernels(data, "matmul", B200_KERNELS):
        sizes = sizes_of(shape)
        flops = 2 * float(np.prod([sizes[key] for key in "mnk"]))
        found.append(flops / rate / float(model.seconds(constants, sizes)[0]))
    return np.array(found)


def attention_ratios(data: Path) -> Floats:
    """The same of causal attention, forward and backward; the source counts the scores above the diagonal, too."""
    hardware = load_hardware(MACHINES["b200"])
    relative, found = hardware.constant("attention.backward"), []
    for shape, rate, row in kernels(data, "sdp", B200_KERNELS):
        batch, length, heads, groups, head, value = (
            int(shape[key]) for key in ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
        )
        way, size = (ATTENTION_BACKWARD_FLOPS, 2.0) if row["op"] == "sdp_bwd" else (1.0, 1.0)
        flops = way * 2.0 * batch * heads * length**2 * (head + value)
        traffic = size * 2 * batch * length * (heads * (head + value) + groups * (head + value))
        work = flops / 2 / (relative if way > 1 else 1.0)
        made = one_attention_seconds(hardware, "bfloat16", work, way * length, head, traffic)
        found.append(flops / rate / made)
    return np.array(found)


@lru_cache(maxsize=64)
def calibrated_b200(data: Path, seed: int) -> Hardware:
    """The rates of products and of attention as 20 kernels of that host have them, drawn by seed: medians."""
    source = np.random.default_rng(seed)
    hardware = load_hardware(MACHINES["b200"])
    changed = dict(hardware.constants)
    for name, ratios, count in (
        ("matmul", kernel_ratios(data), CALIBRATION_KERNELS - CALIBRATION_ATTENTIONS),
        ("attention", attention_ratios(data), CALIBRATION_ATTENTIONS),
    ):
        changed[f"{name}.compute"] /= float(np.median(ratios[source.permutation(len(ratios))[:count]]))
    return replace(hardware, constants=tuple(changed.items()))


def calibrated_steps(data: Path, seed: int) -> list[Step]:
    return [replace(row, hardware=calibrated_b200(data, seed)) for row in b200(data)]


def b200_steps(data: Path) -> list[str]:
    """As shipped, and with 20 kernels of that host; peak memory beside."""
    rows = b200(data)
    plain = errors(rows)
    draws = [errors(calibrated_steps(data, seed)) for seed in range(KERNEL_DRAWS)]
    lines = table(
        "run", "measured ms", "as shipped", f"{CALIBRATION_KERNELS} kernels", "peak GiB", "predicted"
    )  # fmt: skip
    memory = np.array([predicted_of(row).memory.peak / GIB / row.memory_gb - 1 for row in rows])
    for row, a, b, off in zip(rows, plain, np.mean(draws, axis=0), memory, strict=True):
        run, made = row.run, predicted_of(row).memory.peak / GIB
        shared = f" cp {run.cp}, {row.model.sequence} tokens" if run.cp > 1 else f" pp {run.pp} dp {run.dp}"
        name = f"{row.name}, {row.model.layers} layers, tp {run.tp}{shared}, {run.micro_batches}"
        lines.append(
            f"| {name} micro-batches | {row.measured_seconds * 1e3:.0f} | {a:+.1%} | {b:+.1%} | {row.memory_gb:.1f} | "
            f"{made:.1f} ({off:+.1%}) |"
        )
    spread = np.array([np.abs(draw).mean() for draw in draws])
    ranks = [ranking(rows, seconds_of(rows))] if len({r.workload for r in rows}) < len(rows) / 2 else []
    order = f" Rank correlation of workloads with three splits {ranks[0].correlation:.2f}." if ranks else ""
    return [
        *lines,
        "",
        f"Mean error as shipped {percent(plain)}; with {CALIBRATION_KERNELS} kernels {spread.mean():.1%} "
        f"({spread.min():.1%} to {spread.max():.1%} over the draws). Peak memory {np.abs(memory).mean():.1%}.{order}",
    ]


def hopper_steps(data: Path) -> list[str]:
    rows = published("megatron_core")
    lines = step_table(rows, seconds_of(rows))
    return [*lines, "", f"Error {percent(errors(rows))} (mean, median, bias)."]


# --- Ascend -----------------------------------------------------------------------------------------------------------

PROFILE_910C, GIGA, MICRO = "ascend-910c", 1e9, 1e-6
TOKENS, HIDDEN, TOP_K = 4096, 7168, 8  # of a device in the throughput kernels
# sgl-project/sgl-kernel-npu's README (DeepEP-Ascend on an A3 SuperPoD of 384, Apache-2.0): devices (dies), GB/s of
# dispatch in int8 and of combine in bf16: 4,096 tokens a device.
THROUGHPUT = ((8, 146, 125), (16, 107, 103), (32, 102, 95), (64, 81, 91), (128, 57, 81))
# Of 128 tokens, there and in the paper on CloudMatrix384 (arXiv 2506.12708, section 5): microseconds and GB/s of
# dispatch, of combine. Training steps of decoders are in neither, nor in MindSpeed's or MindFormers' tables.
LATENCY = (("DeepEP-Ascend", 8, 132, 58, 126, 116), ("DeepEP-Ascend", 16, 139, 55, 135, 109),
           ("DeepEP-Ascend", 32, 153, 49, 151, 97), ("CloudMatrix384", 8, 116, 71, 118, 131),
           ("CloudMatrix384", 256, 152, 54, 149, 103))  # fmt: skip


def ascend_steps(data: Path) -> list[str]:
    """As uncalibrated, and with one number a device fitted to half of the models."""
    own = ascend()
    there, here = errors(own), errors(ascend("kernels"))
    lines = ["| run | profile | measured s | uncalibrated | mindspeed | |", "|---|---|--:|--:|--:|---|"]
    for row, a, b in zip(own, here, there, strict=True):
        word = "fitted" if row.fitted else "**held out**"
        lines.append(
            f"| {row.name} | {row.hardware.name} | {row.measured_seconds:.2f} | {a:+.1%} | {b:+.1%} | {word} |"
        )
    found = []
    for profile in ("ascend-910b2", "ascend-910a"):
        at = np.array([row.hardware.name == profile for row in own])
        out = at & np.array([not row.fitted for row in own])
        found.append(f"{profile}: uncalibrated {percent(here[at])}; held out {percent(there[out])} ({out.sum()} rows).")
    known = software_tables()["software"][ASCEND]["products"]
    rates = ", ".join(f"{device} {figure['value']:.2f}" for device, figure in known.items())
    return [*lines, "", *found, f"The fitted rates of products: {rates}."]


def _expert_collectives() -> Iterator[tuple[str, int, str, float, float]]:
    """Source, devices, what, bytes that a device sends, seconds measured."""
    for devices, dispatch, combine in THROUGHPUT:
        for what, rate, item in (("dispatch, int8", dispatch, 1), ("combine, bf16", combine, 2)):
            size = float(TOKENS * TOP_K * HIDDEN * item)
            yield "DeepEP-Ascend, 4,096 tokens", devices, what, size, size / (rate * GIGA)
    for source, devices, there, there_rate, back, back_rate in LATENCY:
        for what, micro, rate in (("dispatch, int8", there, there_rate), ("combine, bf16", back, back_rate)):
            seconds = micro * MICRO
            yield f"{source}, 128 tokens", devices, what, seconds * rate * GIGA, seconds


def expert_collectives(data: Path) -> list[str]:
    """Of the 910C. Nothing is fitted."""
    hardware = load_hardware(PROFILE_910C)
    lines = [
        "| source | devices | what | MB of a device | measured us | predicted us | error |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    large, small = [], []
    for source, devices, what, size, seconds in _expert_collectives():
        made = collective_seconds(hardware, Mesh((("ep", devices),)), 0, "all_to_all", size)
        (large if "4,096" in source else small).append(made / seconds - 1)
        lines.append(
            f"| {source} | {devices} | {what} | {size / 1e6:.1f} | {seconds / MICRO:.0f} | {made / MICRO:.0f} | "
            f"{made / seconds - 1:+.0%} |"
        )
    return [
        *lines,
        "",
        f"Large messages {percent(np.array(large))}, small ones {percent(np.array(small))} (mean, median, bias): the",
        "profile's links don't lose bandwidth as groups grow, as these do, and small messages there take a fixed time",
        "that no figure of the profile has: calibrate (`autoshard calibrate`). For kernels the paper has two",
        "figures that bear on training: latent attention in bf16 at 65.4% of the peak and 84.1% of the memory's",
        "bandwidth",
        f"(here {hardware.constant('attention.compute'):.0%} and {hardware.constant('attention.memory'):.0%}), and "
        f"products in int8 at 77.4 to 82.7% (here {hardware.constant('matmul.compute'):.0%}, in bf16); of neither are",
        "shapes or seconds published to which the formulas could be compared.",
    ]


# --- FSDP -------------------------------------------------------------------------------------------------------------

DEVICES_PER_NODE = 8
FAR = 0.15


def fsdp(data: Path) -> list[str]:
    """MPT by device, half and number of nodes; then the rows that are far off."""
    rows = mpt(data)
    own, plain = errors(rows), errors(mpt(data, "kernels"))
    kinds = [(str(r.workload[0]), r.fitted, "one" if r.run.devices <= DEVICES_PER_NODE else "many") for r in rows]
    lines = [
        "| device | models | nodes | rows | error: mean, median, bias | worst | kernels: mean, bias |",
        "|---|---|---|--:|---|--:|---|",
    ]
    for gpu in GPUS:
        for fitted, name in ((True, "fitted"), (False, "**held out**")):
            for nodes in ("one", "many"):
                at = [i for i, kind in enumerate(kinds) if kind == (gpu, fitted, nodes)]
                lines += [_fsdp_line(gpu.replace("_", " "), name, nodes, own[at], plain[at])] if at else []
    for name, gpus in GENERATIONS.items():
        at = [i for i, kind in enumerate(kinds) if kind[0] in gpus and not kind[1]]
        lines.append(_fsdp_line(f"all of {name}", "**held out**", "both", own[at], plain[at]))
    far = sorted((abs(e), i) for i, e in enumerate(own) if abs(e) > FAR)[::-1]
    named = [
        f"{rows[i].name} on {rows[i].run.devices} {kinds[i][0].replace('_', ' ')}, sequence {rows[i].model.sequence}, "
        f"micro-batch {rows[i].run.micro_batch} {own[i]:+.0%}"
        for _, i in far
    ]  # each by name: nothing is left out of the means
    return [*lines, "", f"Missed by more than {FAR:.0%} ({len(named)} of {len(own)}): {'; '.join(named)}."]


def _fsdp_line(device: str, name: str, nodes: str, own: Floats, other: Floats) -> str:
    worst = own[np.argmax(np.abs(own))]
    kernels = f"{np.abs(other).mean():.1%}, {other.mean():+.1%}"
    return f"| {device} | {name} | {nodes} | {len(own)} | {percent(own)} | {worst:+.0%} | {kernels} |"


def eager_steps(data: Path) -> list[str]:
    """FSDP on other hosts: those that were not compiled."""
    lines = [
        "| run | devices | recomputed | measured s | predicted s | error |",
        "|---|--:|---|--:|--:|--:|",
    ]
    rows = [row for row in fsdp_runs() if not row.run.compiled]
    off = errors(rows)
    for row, made, error in zip(rows, seconds_of(rows), off, strict=True):
        seconds = f"{row.measured_seconds:.2f} | {made:.2f}"
        lines.append(f"| {row.name} | {row.run.devices} | {row.again} | {seconds} | {error:+.1%} |")
    lines.append("")
    for framework in ("torchtitan", "fms-fsdp"):
        for device in ("A100", "H100"):
            own = off[[row.release == framework and row.name.endswith(device) for row in rows]]
            lines.append(f"{framework} on {device}: {percent(own)} (mean, median, bias).")
    return [*lines, f"All: {percent(off)}."]


def compiled_steps(data: Path) -> list[str]:
    """The gain over the eager run beside it, and the step."""
    lines = table(
        "run", "devices", "gain, measured", "predicted", "compiled, measured s", "predicted s", "error"
    )  # fmt: skip
    pairs = [(a, b) for a, b in pairwise(fsdp_runs()) if b.run.compiled and not a.run.compiled]
    gains = []
    for eager, compiled in pairs:
        slow, fast = seconds_of([eager, compiled])
        gains.append((eager.measured_seconds / compiled.measured_seconds, slow / fast))
        step = f"{compiled.measured_seconds:.2f} | {fast:.2f} | {fast / compiled.measured_seconds - 1:+.1%}"
        shown = step if is_known(compiled) else "– | – | –"
        lines.append(f"| {eager.name} | {eager.run.devices} | {gains[-1][0]:.2f} | {gains[-1][1]:.2f} | {shown} |")
    measured_gain, own_gain = np.array(gains).T
    return [
        *lines,
        "",
        f"Mean gain {measured_gain.mean():.2f} measured, {own_gain.mean():.2f} predicted; torchtitan's, whose layers",
        "are written as those that are priced, nearer than fms-fsdp's. Steps:",
        f"{percent(errors([compiled for _, compiled in pairs if is_known(compiled)]))} (mean, median, bias).",
        "What an eager step does besides its operators and a compiled one joins is not predicted of either: the sums",
        "of a value's gradients, and rotations as fms-fsdp writes them, by matrices of two by two in float32.",
    ]


def float8_steps(data: Path) -> list[str]:
    """Each row, in three ways: as it ran at FSDP's rates, at those of kernels, and had it run in bfloat16."""
    lines = table(
        "run", "devices", "measured s", "`fsdp` s", "error", "`kernels` s", "error", "in bfloat16, `fsdp` s"
    )  # fmt: skip
    titan = published("float8")
    groups = ([r for r in titan if r.run.pp == 1], [r for r in titan if r.run.pp > 1], mpt_float8(data))
    words = []
    for name, rows in zip(("torchtitan without stages", "with stages", "MosaicML"), groups, strict=True):
        ways = ((FP8_FSDP, FSDP_SOFTWARE), (FP8_FSDP, "kernels"), (FSDP, FSDP_SOFTWARE))
        made = [
            seconds_of([replace(r, run=replace(r.run, precision=precision, software=software)) for r in rows])
            for precision, software in ways
        ]
        off = [errors(rows, own) for own in made[:2]]
        for i, row in enumerate(rows):
            rates = " | ".join(f"{made[way][i]:.2f} | {off[way][i]:+.1%}" for way in (0, 1))
            lines.append(
                f"| {row.name} | {row.run.devices} | {row.measured_seconds:.2f} | {rates} | {made[2][i]:.2f} |"
            )
        words.append(f"{name}: {percent(off[0])} with `fsdp`, {percent(off[1])} with `kernels` (mean, median, bias).")
    return [*lines, "", *words]


TABLES = {
    "FSDP on A100 and H100": fsdp,
    "Megatron-Core on eight B200": b200_steps,
    "Megatron-Core on H100": hopper_steps,
    "Ascend": ascend_steps,
    "Ascend 910C": expert_collectives,
    "FSDP on other hosts": eager_steps,
    "Compiled": compiled_steps,
    "Steps in float8": float8_steps,
    "Weak scaling of Megatron-LM": scaling,
    "Training steps of Megatron-LM's models": megatron,
    "Tensor parallelism in one node": within_a_node,
    "Memory of Megatron-LM's models": memory,
    "Memory that was reserved": reserved_by_allocator,
}
