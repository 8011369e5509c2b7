"""Published FSDP steps of other hosts than the MPT table's, eager and compiled, beside `autoshard estimate`. Nothing is
fitted to any of them.

torchtitan's benchmarks of December 2024 and its docs/performance.md; the two posts of IBM and Meta on fms-fsdp
(pytorch.org/blog/maximizing-training, March 2024, and maximizing-training-throughput, May 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.estimate.transformer import FSDP, TrainingRun, Transformer
from benchmarks.steps import Floats, NamedRow, host_of, percent, predicted

SOFTWARE = "fsdp"
TORCHTITAN, FMS = "torchtitan", "fms-fsdp"
HBM2E = 2.4e12  # bytes/s, of torchtitan's H100 of 96 GB, as its page says
# Layers, hidden, heads, KV heads, feed-forward, vocabulary, sequence.
MODELS = {
    "Llama 3 8B": (32, 4096, 32, 8, 14336, 128_256, 8192),
    "Llama 3 70B": (80, 8192, 64, 8, 28672, 128_256, 8192),
    "Llama 2 7B": (32, 4096, 32, 32, 11008, 32_000, 4096),
    "Llama 2 13B": (40, 5120, 40, 40, 13824, 32_000, 4096),
    "Llama 2 34B": (48, 8192, 64, 8, 22016, 32_000, 4096),
    "Llama 2 70B": (80, 8192, 64, 8, 28672, 32_000, 4096),
}
# Model, its framework, device, GPUs, micro-batch, shards (0: all), recomputation ("half": of every second layer),
# tokens/s a device eager and compiled (0: not published).
PAIRS = (
    ("Llama 3 8B", TORCHTITAN, "h100", 8, 2, 0, "operators", 5762, 6667),
    ("Llama 3 8B", TORCHTITAN, "h100", 128, 2, 0, "operators", 5605, 6514),
    ("Llama 3 8B", TORCHTITAN, "a100", 64, 1, 0, "half", 2904, 0),
    ("Llama 3 8B", TORCHTITAN, "a100", 64, 1, 0, "operators", 2973, 0),
    ("Llama 3 70B", TORCHTITAN, "a100", 64, 1, 0, "full", 331, 0),
    ("Llama 2 13B", TORCHTITAN, "a100", 64, 2, 0, "none", 2162, 0),
    ("Llama 2 13B", TORCHTITAN, "a100", 64, 2, 0, "half", 1914, 0),
    ("Llama 2 13B", TORCHTITAN, "a100", 64, 2, 0, "operators", 1904, 0),
    ("Llama 2 70B", TORCHTITAN, "a100", 64, 1, 0, "operators", 355, 0),
    ("Llama 2 70B", TORCHTITAN, "a100", 64, 2, 0, "full", 353, 0),
    ("Llama 2 7B", FMS, "a100", 128, 2, 8, "none", 3700, 3700 * 0.68 / 0.57),
    ("Llama 2 13B", FMS, "a100", 128, 2, 8, "half", 1800, 1800 * 0.60 / 0.51),
    ("Llama 2 34B", FMS, "a100", 128, 2, 0, "full", 700, 700 * 0.54 / 0.47),
    ("Llama 2 70B", FMS, "a100", 128, 2, 0, "full", 370, 370 * 0.55 / 0.50),
    ("Llama 2 7B", FMS, "h100", 96, 2, 8, "none", 7500, 0),
    ("Llama 2 13B", FMS, "h100", 96, 2, 8, "half", 3800, 0),
    ("Llama 2 34B", FMS, "h100", 96, 2, 0, "full", 1550, 0),
    ("Llama 2 70B", FMS, "h100", 96, 2, 0, "full", 800, 0),
    # MFU alone, of both, in tokens by the MFU and tokens of the cluster above: 0.37, 0.35, 0.32 and 0.34 there.
    ("Llama 2 7B", FMS, "h100", 464, 2, 8, "none", 7500 * 0.37 / 0.37, 7500 * 0.45 / 0.37),
    ("Llama 2 13B", FMS, "h100", 464, 2, 8, "half", 3800 * 0.35 / 0.35, 3800 * 0.43 / 0.35),
    ("Llama 2 34B", FMS, "h100", 464, 2, 0, "full", 1550 * 0.32 / 0.32, 1550 * 0.38 / 0.32),
    ("Llama 2 70B", FMS, "h100", 464, 2, 0, "full", 800 * 0.32 / 0.34, 800 * 0.38 / 0.34),
)
# Of torchtitan's A100 steps (April 2024), whose configs of that month set fused_rmsnorm; the 70B's set rmsnorm.
FUSED_NORMS = ("Llama 3 8B", "Llama 2 13B")
# Bits/s of a node between nodes, as the posts tell; torchtitan's H100 have the profile's, of its A100 nothing is told.
FMS_NETWORK = {("a100", 128): 400e9, ("h100", 96): 800e9, ("h100", 464): 3.2e12}
PROFILES = {"a100": "a100-80g-sxm", "h100": "h100-80g-sxm"}


@dataclass(frozen=True)
class FsdpRun:
    """A published step and what is predicted of it."""

    row: NamedRow
    again: str
    seconds: float

    @property
    def error(self) -> float:
        return self.seconds / self.row.measured_seconds - 1


@lru_cache(maxsize=1)
def torchtitan_h100() -> Hardware:
    """The other constants are those of the H100 SXM."""
    return replace(load_hardware("h100-80g-sxm"), name="h100-96g-hbm2e", memory_bandwidth=HBM2E)


def _with_network(base: Hardware, node_bits: float) -> Hardware:
    """With so many bits/s between nodes, which the devices of one share."""
    network = replace(base.links[1], bandwidth=node_bits / 8 / base.devices_per_node)
    return replace(base, links=(base.links[0], network, *base.links[2:]))


def _hardware(framework: str, device: str, devices: int) -> Hardware:
    if framework == FMS:
        return _with_network(load_hardware(PROFILES[device]), FMS_NETWORK[device, devices])
    return torchtitan_h100() if device == "h100" else load_hardware(PROFILES[device])


@lru_cache(maxsize=1)
def fsdp_runs() -> tuple[FsdpRun, ...]:
    """The eager runs, and the compiled ones."""
    found = []
    for pair in PAIRS:
        for compiled, tokens in enumerate(pair[-2:]):
            if tokens:
                found.append(_run(*pair[:-2], float(tokens), bool(compiled)))
    return tuple(found)


def _run(
    name: str, framework: str, device: str, devices: int, micro: int, shard: int, again: str, tokens: float,
    compiled: bool,
) -> FsdpRun:  # fmt: skip
    """Both write norms operator by operator but in FUSED_NORMS; torchtitan casts its logits and reduces in float32."""
    layers, hidden, heads, kv, inner, words, length = MODELS[name]
    theirs = framework == TORCHTITAN
    hardware = _hardware(framework, device, devices)
    norm = "rms_norm" if theirs and device == "a100" and name in FUSED_NORMS else "rms_norm_apart"
    model = Transformer(
        layers, hidden, heads, length, words, kv, inner, "swiglu", "flash2", "rotary", norm, bias=False, tied=False,
        fp32_loss=theirs,
    )  # fmt: skip
    run = TrainingRun(
        micro * devices, micro, devices, zero=3, shard=shard, overlap=True, precision=FSDP,
        reduced="fp32" if theirs else "bf16", software=SOFTWARE, compiled=compiled,
    )  # fmt: skip
    told = f"{framework} {name}, {device.upper()}"
    row = NamedRow(model, run, run.batch * length / tokens / devices, (told,), told, hardware)
    return FsdpRun(row, again, seconds_of(row, again))


def seconds_of(row: NamedRow, again: str) -> float:
    """Half of the layers computed again is the mean of none and all."""
    kinds = ("none", "full") if again == "half" else (again,)
    runs = [replace(row.run, recompute=kind) for kind in kinds]  # type: ignore[arg-type]
    made = [predicted(row.model, run, row.hardware, host_of(row.hardware, run.software)) for run in runs]
    return float(np.mean([step.step_seconds for step in made]))


def eager_steps(data: Path) -> list[str]:
    """Those that were not compiled."""
    lines = [
        "| run | devices | recomputed | measured s | error |",
        "|---|--:|---|--:|--:|",
    ]
    chosen = [own for own in fsdp_runs() if not own.row.run.compiled]
    lines += [_line(own) for own in chosen]
    lines.append("")
    for framework in (TORCHTITAN, FMS):
        for device in ("A100", "H100"):
            errors = _errors([o for o in chosen if o.row.name.startswith(framework) and o.row.name.endswith(device)])
            lines.append(f"{framework} on {device}: {percent(errors)}.")
    return [*lines, f"All: {percent(_errors(chosen))} (mean, median, bias)."]


def compiled_steps(data: Path) -> list[str]:
    """The gain over the eager run beside it, and the step."""
    lines = [
        "| run | devices | gain, measured | predicted | error of the compiled step |",
        "|---|--:|--:|--:|--:|",
    ]
    gains = []
    for eager, compiled in _pairs():
        measured, made = (
            eager.row.measured_seconds / compiled.row.measured_seconds, eager.seconds / compiled.seconds
        )  # fmt: skip
        gains.append((measured, made))
        shown = f"{compiled.error:+.1%}" if is_known(compiled) else "–"
        lines.append(f"| {eager.row.name} | {eager.row.run.devices} | {measured:.2f} | {made:.2f} | {shown} |")
    measured_gain, own_gain = np.array(gains).T
    known = [compiled for _, compiled in _pairs() if is_known(compiled)]
    return [
        *lines,
        "",
        f"Mean gain {measured_gain.mean():.2f} measured, {own_gain.mean():.2f} predicted. Compiled steps:",
        f"{percent(_errors(known))} (mean, median, bias). Not predicted, and fused in a compiled step: sums of a",
        "value's gradients, and the rotations of fms-fsdp, by two-by-two matrices in float32.",
    ]


def is_known(own: FsdpRun) -> bool:
    """Whether a run's step can be judged: what it computes again is known, or (13B, eager) told by its HFU."""
    return not own.row.run.compiled or own.row.name.startswith(TORCHTITAN) or own.again == "none"


def _pairs() -> list[tuple[FsdpRun, FsdpRun]]:
    runs = fsdp_runs()
    return [(a, b) for a, b in pairwise(runs) if b.row.run.compiled and not a.row.run.compiled]


def _errors(chosen: Sequence[FsdpRun]) -> Floats:
    return np.array([own.error for own in chosen])


def _line(own: FsdpRun) -> str:
    row = own.row
    return f"| {row.name} | {row.run.devices} | {own.again} | {row.measured_seconds:.2f} | {own.error:+.1%} |"


TABLES = {
    "FSDP on other hosts": eager_steps,
    "Compiled": compiled_steps,
}
