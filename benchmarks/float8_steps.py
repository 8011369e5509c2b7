"""Published steps whose linear layers multiply in float8 beside `autoshard estimate --precision fp8-fsdp`. Nothing is
fitted to any of them: no band, no rate of a kernel.

torchtitan's benchmarks (Llama 3.1 on H100 and H200, torchao's `Float8Linear`, compiled) and the rows of MosaicML's
table that ran in amp_fp8 (TransformerEngine, eager). What the pages leave out is assumed, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.estimate.transformer import FP8_FSDP, Schedule, TrainingRun, Transformer
from benchmarks import fsdp_steps
from benchmarks.cluster_steps import LLAMA_VOCABULARY
from benchmarks.fsdp_runs import torchtitan_h100
from benchmarks.steps import Floats, NamedRow, host_of, percent, predicted

SIZES = {  # of Llama 3.1: layers, hidden, heads, feed-forward; 8 KV heads
    "8B": (32, 4096, 32, 14336), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248),
}  # fmt: skip
H100, H200 = "h100", "h200"
# model, devices, FSDP x TP x PP x CP, sequence, sequences of a replica, recomputation, schedule, tokens/s a device
TORCHTITAN = (
    ("8B", H100, 8, 1, 1, 1, 8192, 2, "operators", "1f1b", 8532),
    ("8B", H100, 8, 1, 1, 1, 32768, 1, "full", "1f1b", 3890),
    ("8B", H100, 2, 1, 1, 4, 131072, 1, "full", "1f1b", 1071),
    ("70B", H100, 32, 8, 1, 1, 8192, 16, "full", "1f1b", 829),
    ("405B", H100, 8, 8, 8, 1, 8192, 32, "full", "interleaved", 128),
    ("405B", H100, 4, 8, 8, 2, 65536, 8, "full", "1f1b", 47),
    ("405B", H100, 1, 8, 8, 8, 262144, 8, "full", "1f1b", 16),
    ("8B", H200, 64, 1, 1, 1, 8192, 2, "operators", "1f1b", 10753),
)
CHUNKS = 2  # of a device under the interleaved schedule; the page does not say


def _hardware(name: str) -> Hardware:
    return torchtitan_h100() if name == H100 else load_hardware("h200-141g-sxm")


@lru_cache(maxsize=1)
def torchtitan() -> tuple[tuple[NamedRow, str], ...]:
    """Rows, and which layers are computed again. Micro-batches of one sequence with stages, where FSDP keeps gathered
    weights (its default with stages); else one micro-batch."""
    found = []
    for name, device, dp, tp, pp, cp, length, batch, again, schedule, tokens in TORCHTITAN:
        layers, hidden, heads, inner = SIZES[name]
        model = Transformer(
            layers, hidden, heads, length, LLAMA_VOCABULARY, 8, inner, "swiglu", "flash2", "rotary", "rms_norm_apart",
            bias=False, tied=False, fp32_loss=True,
        )  # fmt: skip
        kind: Schedule = "interleaved" if schedule == "interleaved" else "1f1b"
        run = TrainingRun(
            batch * dp, 1 if pp > 1 else batch, dp, tp, pp, kind, CHUNKS if kind == "interleaved" else 1,
            zero=3 if pp == 1 or dp * cp == 1 else 2, sequence_parallel=tp > 1, precision=FP8_FSDP, overlap=True,
            software=fsdp_steps.SOFTWARE, cp=cp, compiled=True,
        )  # fmt: skip
        split = " x ".join(
            f"{kind} {size}" for kind, size in (("FSDP", dp), ("TP", tp), ("PP", pp), ("CP", cp)) if size > 1
        )
        told = f"torchtitan {name}, {split}, {length} tokens" + (" (H200)" if device == H200 else "")
        seconds = run.batch * length / tokens / run.devices
        found.append((NamedRow(model, run, seconds, (told,), told, _hardware(device)), again))
    return tuple(found)


@lru_cache(maxsize=2)
def mosaic(data: Path) -> tuple[tuple[NamedRow, str], ...]:
    """Those of MosaicML's table in amp_fp8."""
    found = []
    for row in fsdp_steps.rows(data, float8=True):
        name = f"MPT {row.name} on {row.run.devices}, {row.model.sequence} tokens, eager"
        hardware = load_hardware(fsdp_steps.PROFILES[row.gpu])
        found.append((NamedRow(row.model, row.run, row.measured_seconds, (name,), name, hardware), row.run.recompute))
    return tuple(found)


def seconds_of(row: NamedRow, again: str, precision: str, software: str) -> float:
    run = replace(row.run, recompute=again, precision=precision, software=software)  # type: ignore[arg-type]
    return predicted(row.model, run, row.hardware, host_of(row.hardware, run.software)).step_seconds


def tables(data: Path) -> list[str]:
    """Each row at FSDP's rates and at those of kernels."""
    lines = ["| run | devices | measured s | `fsdp` | `kernels` |", "|---|--:|--:|--:|--:|"]
    groups = [[made for made in torchtitan() if made[0].run.pp == 1], [m for m in torchtitan() if m[0].run.pp > 1]]
    found = [_errors(lines, group) for group in (*groups, mosaic(data))]
    names = ("Mean, median, bias, torchtitan without stages", "With stages", "MosaicML")
    lines.append("")
    lines += [
        f"{name}: {percent(fsdp)} with `fsdp`, {percent(kernels)} with `kernels`."
        for name, (fsdp, kernels) in zip(names, found, strict=True)
    ]
    return lines


def _errors(lines: list[str], rows: Sequence[tuple[NamedRow, str]]) -> tuple[Floats, Floats]:
    """Adds a line for each row."""
    found = []
    for row, again in rows:
        fsdp, kernels = (seconds_of(row, again, FP8_FSDP, software) for software in (fsdp_steps.SOFTWARE, "kernels"))
        errors = [made / row.measured_seconds - 1 for made in (fsdp, kernels)]
        found.append(errors)
        shown = " | ".join(f"{error:+.1%}" for error in errors)
        lines.append(f"| {row.name} | {row.run.devices} | {row.measured_seconds:.2f} | {shown} |")
    fsdp_errors, kernel_errors = np.array(found).T
    return fsdp_errors, kernel_errors


TABLES = {
    "Steps in float8": tables,
}
