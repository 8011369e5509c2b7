"""Tables of published steps and bytes beside what `autoshard estimate` predicts: Megatron, FSDP, Ascend, float8.

Nothing is fitted to a whole step here, but where a table says so: then to half of its models, and judged on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
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
from benchmarks import published_rows as runs
from benchmarks.measurements import kernels, product_ratios
from benchmarks.published_rows import GIB, Cells, Figures, Floats, Step, errors, off, seconds_of


def with_seconds(rows: Sequence[Step]) -> Figures:
    return {"rows": list(zip(rows, seconds_of(rows), strict=True))}


# --- Megatron-LM's papers ---------------------------------------------------------------------------------------------


def memory(data: Path) -> Figures:
    """Published bytes of a device (the paper's arithmetic, not measured); states are a mean over stages."""
    cells: list[Cells] = []
    kinds = ("weights, gradients, optimizer", "activations", "activations, selective and sequence parallel")
    full, lean = runs.published("selective")[::2], runs.published("selective")[1::2]
    for (name, real), whole, less in zip(runs.TABLES["figure_1"].items(), full, lean, strict=True):
        plain = replace(whole, run=replace(whole.run, recompute="none"))
        predicted = (
            parameter_count(plain.model) / 8 / plain.run.pp * sum(STATE_BYTES[plain.run.precision]),
            runs.predicted_of(plain).memory.activations,
            runs.predicted_of(less).memory.activations,
        )
        for kind, size_bytes, other in zip(kinds, predicted, real, strict=True):
            cells.append((name, kind, other, size_bytes / GIB))
    return {"rows": cells}


def reserved_by_allocator(data: Path) -> Figures:
    cells: list[Cells] = []
    for row in runs.published("reserved"):
        taken = reserved_memory(row.model, row.run, row.hardware)
        assert taken is not None
        cells.append((row, runs.predicted_of(row).memory.peak / GIB, taken / GIB))
    return {"rows": cells}


# --- Megatron-Core on B200 and H100 -----------------------------------------------------------------------------------

B200_KERNELS = "b200_bf16_ceperm"
CALIBRATION_KERNELS, CALIBRATION_ATTENTIONS, KERNEL_DRAWS = 20, 5, 10


def kernel_ratios(data: Path) -> Floats:
    """Measured seconds of that host's products over those of the shipped constants, forward and backward."""
    hardware = load_hardware(runs.MACHINES["b200"])
    model = Products(hardware.peak_flops("bfloat16"), hardware.memory_bandwidth)
    constants = {free.key: hardware.constant(f"matmul.{free.key}") for free in model.free}
    return np.array([ratio for _, ratio in product_ratios(data, B200_KERNELS, model, constants)])


def attention_ratios(data: Path) -> Floats:
    """The same of causal attention, forward and backward; the source counts the scores above the diagonal, too."""
    hardware = load_hardware(runs.MACHINES["b200"])
    relative, ratios = hardware.constant("attention.backward"), []
    for shape, rate, row in kernels(data, "sdp", B200_KERNELS):
        batch, length, heads, groups, head, value = (
            int(shape[key]) for key in ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
        )
        factor, size = (ATTENTION_BACKWARD_FLOPS, 2.0) if row["op"] == "sdp_bwd" else (1.0, 1.0)
        flops = factor * 2.0 * batch * heads * length**2 * (head + value)
        traffic = size * 2 * batch * length * (heads * (head + value) + groups * (head + value))
        work = flops / 2 / (relative if factor > 1 else 1.0)
        seconds = one_attention_seconds(hardware, "bfloat16", work, factor * length, head, traffic)
        ratios.append(flops / rate / seconds)
    return np.array(ratios)


@lru_cache(maxsize=64)
def calibrated_b200(data: Path, seed: int) -> Hardware:
    """The rates of products and of attention as 20 kernels of that host have them, drawn by seed: medians."""
    source = np.random.default_rng(seed)
    hardware = load_hardware(runs.MACHINES["b200"])
    changed = dict(hardware.constants)
    for name, ratios, count in (
        ("matmul", kernel_ratios(data), CALIBRATION_KERNELS - CALIBRATION_ATTENTIONS),
        ("attention", attention_ratios(data), CALIBRATION_ATTENTIONS),
    ):
        changed[f"{name}.compute"] /= float(np.median(ratios[source.permutation(len(ratios))[:count]]))
    return replace(hardware, constants=tuple(changed.items()))


def calibrated_steps(data: Path, seed: int) -> list[Step]:
    return [replace(row, hardware=calibrated_b200(data, seed)) for row in runs.b200(data)]


def b200_steps(data: Path) -> Figures:
    """As shipped, and with 20 kernels of that host; peak memory beside."""
    rows = runs.b200(data)
    plain = errors(rows)
    draws = [errors(calibrated_steps(data, seed)) for seed in range(KERNEL_DRAWS)]
    memory = np.array([runs.predicted_of(row).memory.peak / GIB / row.memory_gb - 1 for row in rows])
    groups: dict[str, list[int]] = {}
    cells: list[Cells] = []
    for place, row in enumerate(rows):
        run = row.run
        shared = f"cp {run.cp}, {row.model.sequence} tokens" if run.cp > 1 else f"pp {run.pp}"
        groups.setdefault(f"{row.name}, {row.model.layers} layers, tp {run.tp} {shared}", []).append(place)
    for name, at in groups.items():
        counts = ", ".join(str(rows[i].run.micro_batches) for i in at)
        seconds = ", ".join(f"{rows[i].measured_seconds * 1e3:.0f}" for i in at)
        each = (", ".join(f"{some[i]:+.0%}" for i in at) for some in (plain, np.mean(draws, axis=0)))
        cells.append((name, counts, seconds, *each, f"{rows[at[0]].memory_gb:.1f}", f"{memory[at[0]]:+.1%}"))
    return {
        "rows": cells,
        "kernels": CALIBRATION_KERNELS,
        "plain": plain,
        "spread": np.array([np.abs(draw).mean() for draw in draws]),
        "memory": np.abs(memory).mean(),
    }


def hopper_steps(data: Path) -> Figures:
    rows = runs.published("megatron_core")
    return with_seconds(rows) | {"errors": errors(rows)}


# --- Ascend -----------------------------------------------------------------------------------------------------------

PROFILE_910C, GIGA, MICRO = "ascend-910c", 1e9, 1e-6
TOKENS, HIDDEN, TOP_K = 4096, 7168, 8  # of a device in the throughput kernels
KERNELS = ("dispatch, int8", "combine, bf16")


def ascend_steps(data: Path) -> Figures:
    """As uncalibrated, and with one number a device fitted to half of the models."""
    rows = runs.ascend()
    there, here = errors(rows), errors(runs.ascend("kernels"))
    cells = []
    for profile in ("ascend-910b2", "ascend-910a"):
        at = np.array([row.hardware.name == profile for row in rows])
        out = at & np.array([not row.fitted for row in rows])
        cells.append((profile, here[at], there[out], out.sum()))
    known = software_tables()["software"][runs.ASCEND]["products"]
    rates = [f"{device} {figure['value']:.2f}" for device, figure in known.items()]
    return {"rows": list(zip(rows, here, there, strict=True)), "by_profile": cells, "rates": rates}


def _expert_collectives() -> Iterator[tuple[str, int, str, float, float]]:
    """Source, devices, what, bytes that a device sends, seconds measured."""
    for devices, *rates in runs.TABLES["experts"]["throughput"]:
        for what, rate, item in zip(KERNELS, rates, (1, 2), strict=True):
            size = float(TOKENS * TOP_K * HIDDEN * item)
            yield "DeepEP-Ascend, 4,096 tokens", devices, what, size, size / (rate * GIGA)
    for name, devices, *both in runs.TABLES["experts"]["latency"]:
        for what, (micro, rate) in zip(KERNELS, (both[:2], both[2:]), strict=True):
            seconds = micro * MICRO
            yield f"{name}, 128 tokens", devices, what, seconds * rate * GIGA, seconds


def expert_collectives(data: Path) -> Figures:
    """Of the 910C. Nothing is fitted."""
    hardware = load_hardware(PROFILE_910C)
    counts = sorted({devices for _, devices, *_ in _expert_collectives()})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    large, small = [], []
    for source, devices, what, size, seconds in _expert_collectives():
        predicted = collective_seconds(hardware, Mesh((("ep", devices),)), 0, "all_to_all", size)
        (large if "4,096" in source else small).append(predicted / seconds - 1)
        cells.setdefault((source, what), {})[devices] = f"{predicted / seconds - 1:+.0%}"
    return {
        "rows": [(*key, *(by_devices.get(devices, "–") for devices in counts)) for key, by_devices in cells.items()],
        "devices": counts,
        "large": np.array(large),
        "small": np.array(small),
        "attention": hardware.constant("attention.compute"),
        "matmul": hardware.constant("matmul.compute"),
    }


# --- FSDP -------------------------------------------------------------------------------------------------------------

DEVICES_PER_NODE = 8
FAR, NAMED = 0.15, 2


def fsdp(data: Path) -> Figures:
    """MPT by generation: fitted models, then the others by number of nodes; then the rows that are far off."""
    rows = runs.mpt(data)
    fsdp_errors, plain = errors(rows), errors(runs.mpt(data, "kernels"))
    kinds = [(str(r.workload[0]), r.fitted, "one" if r.run.devices <= DEVICES_PER_NODE else "many") for r in rows]
    cells: list[Cells] = []
    for name, gpus in runs.GENERATIONS.items():
        at = [i for i, kind in enumerate(kinds) if kind[0] in gpus and kind[1]]
        cells.append((name, "fitted", "all", fsdp_errors[at], plain[at]))
        for nodes in ("one", "many"):
            at = [i for i, kind in enumerate(kinds) if kind[0] in gpus and kind[1:] == (False, nodes)]
            cells.append((name, "**held out**", nodes, fsdp_errors[at], plain[at]))
    far = sorted((abs(e), i) for i, e in enumerate(fsdp_errors) if abs(e) > FAR)[::-1]
    named = [
        f"{rows[i].name} on {rows[i].run.devices} {kinds[i][0].replace('_', ' ')}, sequence {rows[i].model.sequence}, "
        f"micro-batch {rows[i].run.micro_batch} {fsdp_errors[i]:+.0%}"
        for _, i in far[:NAMED]
    ]  # nothing is left out of the means
    return {"rows": cells, "limit": FAR, "far": len(far), "count": len(fsdp_errors), "named": named}


def eager_steps(data: Path) -> Figures:
    """FSDP on other hosts: those that were not compiled."""
    rows = [row for row in runs.fsdp_runs() if not row.run.compiled]
    every = errors(rows)
    groups = [
        (f"{framework} on {device}", every[[r.release == framework and r.name.endswith(device) for r in rows]])
        for framework, device in product(("torchtitan", "fms-fsdp"), ("A100", "H100"))
    ]
    return {"rows": list(zip(rows, every, strict=True)), "groups": groups, "all": every}


def compiled_steps(data: Path) -> Figures:
    """The gain over the eager run beside it, and the step."""
    pairs = [(a, b) for a, b in pairwise(runs.fsdp_runs()) if b.run.compiled and not a.run.compiled]
    cells: list[Cells] = []
    gains = []
    for eager, compiled in pairs:
        slow, fast = seconds_of([eager, compiled])
        gains.append((eager.measured_seconds / compiled.measured_seconds, slow / fast))
        shown = off(fast, compiled.measured_seconds) if runs.is_known(compiled) else "–"
        cells.append((eager.name, eager.run.devices, *(f"{gain:.2f}" for gain in gains[-1]), shown))
    known = [compiled for _, compiled in pairs if runs.is_known(compiled)]
    return {"rows": cells, "gains": np.mean(gains, axis=0), "errors": errors(known)}


def float8_steps(data: Path) -> Figures:
    """Each row at FSDP's rates and at those of kernels."""
    titan = runs.published("float8")
    groups = ([r for r in titan if r.run.pp == 1], [r for r in titan if r.run.pp > 1], runs.mpt_float8(data))
    names = ("Mean, median, bias, torchtitan without stages", "With stages", "MosaicML")
    cells: list[Cells] = []
    means = []
    for name, rows in zip(names, groups, strict=True):
        float8_rows = [replace(row, run=replace(row.run, precision=FP8_FSDP)) for row in rows]
        both = [errors(runs.with_software(float8_rows, software)) for software in (runs.FSDP_SOFTWARE, "kernels")]
        means.append((name, *both))
        cells += zip(rows, *both, strict=True)
    return {"rows": cells, "groups": means}


TABLES = {
    "FSDP on A100 and H100": fsdp,
    "Megatron-Core on eight B200": b200_steps,
    "Megatron-Core on H100": hopper_steps,
    "Ascend": ascend_steps,
    "Ascend 910C": expert_collectives,
    "FSDP on other servers": eager_steps,
    "Compiled": compiled_steps,
    "Steps in float8": float8_steps,
    "Weak scaling of Megatron-LM": lambda data: with_seconds(runs.published("scaling")),
    "Training steps of Megatron-LM's models": lambda data: with_seconds(runs.published("selective")),
    "Tensor parallelism in one node": lambda data: with_seconds(runs.published("within_a_node")),
    "Memory of Megatron-LM's models": memory,
    "Memory that was reserved": reserved_by_allocator,
}
