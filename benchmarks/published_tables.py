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
from autoshard.estimate.state_bytes import STATE_BYTES
from autoshard.estimate.step import parameter_count
from autoshard.estimate.text.reserved_memory import reserved_memory
from autoshard.estimate.transformer import FP8_FSDP
from autoshard.ir.mesh import Mesh
from autoshard.step_corrections.software import tables as software_tables
from benchmarks.measurements import kernels, sizes_of
from benchmarks.published_rows import (
    ASCEND,
    FSDP_SOFTWARE,
    GENERATIONS,
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
    with_software,
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
    kernels_shown = f"{CALIBRATION_KERNELS} kernels"
    header = ("run", "micro-batches", "measured ms", "as shipped", kernels_shown, "measured peak, GiB", "its error")
    lines = table(*header, words=5)
    memory = np.array([predicted_of(row).memory.peak / GIB / row.memory_gb - 1 for row in rows])
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        run = row.run
        shared = f"cp {run.cp}, {row.model.sequence} tokens" if run.cp > 1 else f"pp {run.pp}"
        groups.setdefault(f"{row.name}, {row.model.layers} layers, tp {run.tp} {shared}", []).append(place)
    for name, at in groups.items():
        counts = ", ".join(str(rows[i].run.micro_batches) for i in at)
        seconds = ", ".join(f"{rows[i].measured_seconds * 1e3:.0f}" for i in at)
        each = (", ".join(f"{found[i]:+.0%}" for i in at) for found in (plain, np.mean(draws, axis=0)))
        peak = f"{rows[at[0]].memory_gb:.1f} | {memory[at[0]]:+.1%}"
        lines.append(f"| {name} | {counts} | {seconds} | {' | '.join(each)} | {peak} |")
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
    return [*lines, "", *found, f"The fitted rates of matmuls: {rates}."]


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
    counts = sorted({devices for _, devices, *_ in _expert_collectives()})
    found: dict[tuple[str, str], dict[int, str]] = {}
    large, small = [], []
    for source, devices, what, size, seconds in _expert_collectives():
        made = collective_seconds(hardware, Mesh((("ep", devices),)), 0, "all_to_all", size)
        (large if "4,096" in source else small).append(made / seconds - 1)
        found.setdefault((source, what), {})[devices] = f"{made / seconds - 1:+.0%}"
    return [
        *table("source", "kernel", *map(str, counts[:-1]), f"{counts[-1]} devices", words=2),
        *(
            f"| {source} | {what} | {' | '.join(own.get(devices, '–') for devices in counts)} |"
            for (source, what), own in found.items()
        ),
        "",
        f"Large messages {percent(np.array(large))}, small ones {percent(np.array(small))} (mean, median, bias). These",
        "links lose bandwidth as groups grow and small messages take a fixed time; the profile has neither, so",
        "calibrate (`autoshard calibrate`). The paper's kernels reach 65.4% of the peak in latent attention (here",
        f"{hardware.constant('attention.compute'):.0%}) and 77.4 to 82.7% in int8 matmuls (here "
        f"{hardware.constant('matmul.compute'):.0%}, in bf16), without shapes to compare.",
    ]


# --- FSDP -------------------------------------------------------------------------------------------------------------

DEVICES_PER_NODE = 8
FAR, NAMED = 0.15, 2


def fsdp(data: Path) -> list[str]:
    """MPT by generation: fitted models, then the others by number of nodes; then the rows that are far off."""
    rows = mpt(data)
    own, plain = errors(rows), errors(mpt(data, "kernels"))
    kinds = [(str(r.workload[0]), r.fitted, "one" if r.run.devices <= DEVICES_PER_NODE else "many") for r in rows]
    lines = [
        "| device | models | nodes | rows | error: mean, median, bias | worst | `kernels` |",
        "|---|---|---|--:|---|--:|--:|",
    ]
    for name, gpus in GENERATIONS.items():
        at = [i for i, kind in enumerate(kinds) if kind[0] in gpus and kind[1]]
        lines.append(_fsdp_line(name, "fitted", "all", own[at], plain[at]))
        for nodes in ("one", "many"):
            at = [i for i, kind in enumerate(kinds) if kind[0] in gpus and kind[1:] == (False, nodes)]
            lines.append(_fsdp_line(name, "**held out**", nodes, own[at], plain[at]))
    far = sorted((abs(e), i) for i, e in enumerate(own) if abs(e) > FAR)[::-1]
    named = [
        f"{rows[i].name} on {rows[i].run.devices} {kinds[i][0].replace('_', ' ')}, sequence {rows[i].model.sequence}, "
        f"micro-batch {rows[i].run.micro_batch} {own[i]:+.0%}"
        for _, i in far[:NAMED]
    ]  # nothing is left out of the means
    return [*lines, "", f"Missed by more than {FAR:.0%}: {len(far)} of {len(own)}, the farthest {'; '.join(named)}."]


def _fsdp_line(device: str, name: str, nodes: str, own: Floats, other: Floats) -> str:
    worst = own[np.argmax(np.abs(own))]
    kernels = f"{np.abs(other).mean():.1%}"
    return f"| {device} | {name} | {nodes} | {len(own)} | {percent(own)} | {worst:+.0%} | {kernels} |"


def eager_steps(data: Path) -> list[str]:
    """FSDP on other hosts: those that were not compiled."""
    lines = ["| run | devices | recomputed | measured s | error |", "|---|--:|---|--:|--:|"]
    rows = [row for row in fsdp_runs() if not row.run.compiled]
    off = errors(rows)
    for row, error in zip(rows, off, strict=True):
        lines.append(f"| {row.name} | {row.run.devices} | {row.again} | {row.measured_seconds:.2f} | {error:+.1%} |")
    lines.append("")
    for framework in ("torchtitan", "fms-fsdp"):
        for device in ("A100", "H100"):
            own = off[[row.release == framework and row.name.endswith(device) for row in rows]]
            lines.append(f"{framework} on {device}: {percent(own)}.")
    return [*lines, f"All: {percent(off)} (mean, median, bias)."]


def compiled_steps(data: Path) -> list[str]:
    """The gain over the eager run beside it, and the step."""
    lines = table("run", "devices", "gain, measured", "predicted", "error of the compiled step")
    pairs = [(a, b) for a, b in pairwise(fsdp_runs()) if b.run.compiled and not a.run.compiled]
    gains = []
    for eager, compiled in pairs:
        slow, fast = seconds_of([eager, compiled])
        gains.append((eager.measured_seconds / compiled.measured_seconds, slow / fast))
        shown = f"{fast / compiled.measured_seconds - 1:+.1%}" if is_known(compiled) else "–"
        lines.append(f"| {eager.name} | {eager.run.devices} | {gains[-1][0]:.2f} | {gains[-1][1]:.2f} | {shown} |")
    measured_gain, own_gain = np.array(gains).T
    return [
        *lines,
        "",
        f"Mean gain {measured_gain.mean():.2f} measured, {own_gain.mean():.2f} predicted. Compiled steps:",
        f"{percent(errors([compiled for _, compiled in pairs if is_known(compiled)]))} (mean, median, bias).",
        "`torch.compile` also fuses the sums of a value's gradients, and the rotary embedding of fms-fsdp, which",
        "multiplies by two-by-two matrices in float32: neither is modelled.",
    ]


def float8_steps(data: Path) -> list[str]:
    """Each row at FSDP's rates and at those of kernels."""
    lines = table("run", "devices", "measured s", "`fsdp`", "`kernels`")
    titan = published("float8")
    groups = ([r for r in titan if r.run.pp == 1], [r for r in titan if r.run.pp > 1], mpt_float8(data))
    words = []
    names = ("Mean, median, bias, torchtitan without stages", "With stages", "MosaicML")
    for name, rows in zip(names, groups, strict=True):
        own = [replace(row, run=replace(row.run, precision=FP8_FSDP)) for row in rows]
        off = [errors(with_software(own, software)) for software in (FSDP_SOFTWARE, "kernels")]
        for row, *both in zip(rows, *off, strict=True):
            shown = " | ".join(f"{error:+.1%}" for error in both)
            lines.append(f"| {row.name} | {row.run.devices} | {row.measured_seconds:.2f} | {shown} |")
        words.append(f"{name}: {percent(off[0])} with `fsdp`, {percent(off[1])} with `kernels`.")
    return [*lines, "", *words]


TABLES = {
    "FSDP on A100 and H100": fsdp,
    "Megatron-Core on eight B200": b200_steps,
    "Megatron-Core on H100": hopper_steps,
    "Ascend": ascend_steps,
    "Ascend 910C": expert_collectives,
    "FSDP on other servers": eager_steps,
    "Compiled": compiled_steps,
    "Steps in float8": float8_steps,
    "Weak scaling of Megatron-LM": scaling,
    "Training steps of Megatron-LM's models": megatron,
    "Tensor parallelism in one node": within_a_node,
    "Memory of Megatron-LM's models": memory,
    "Memory that was reserved": reserved_by_allocator,
}
