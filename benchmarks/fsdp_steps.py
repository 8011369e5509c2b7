"""Published FSDP steps beside what `autoshard estimate` predicts. Reads a folder; nothing of it is in here.

MosaicML's llm-foundry benchmarks: MPT models of 125 million to 70 billion parameters on 8 to 512 A100 and H100. One
number a device generation (`sustained`, in costmodels/whole_steps/software.toml) is fitted to every second model by
size; the other models are what it is judged on. The attention kernels are from the papers on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.transformer import FP8_FSDP, FSDP, TrainingRun, Transformer
from benchmarks.measurements import read
from benchmarks.steps import Floats, Row, errors, host_of, percent, predicted

PROFILES = {"a100_40gb": "a100-40g-sxm", "a100_80gb": "a100-80g-sxm", "h100_80gb": "h100-80g-sxm"}
GENERATIONS = {"ampere": ("a100_40gb", "a100_80gb"), "hopper": ("h100_80gb",)}
SIZES = ("125m", "350m", "760m", "1b", "3b", "7b", "13b", "30b", "70b")
FITTED = SIZES[::2]  # the models that `sustained` was fitted to
SOFTWARE = "fsdp"
DEVICES_PER_NODE = 8


@dataclass(frozen=True, eq=False)
class FsdpRow(Row):
    """`gpu` and `name` as the table has them."""

    gpu: str
    name: str

    @property
    def fitted(self) -> bool:
        return self.name in FITTED

    @property
    def nodes(self) -> str:
        return "one" if self.run.devices <= DEVICES_PER_NODE else "many"


@lru_cache(maxsize=8)
def rows(data: Path, software: str = SOFTWARE, float8: bool = False) -> tuple[FsdpRow, ...]:
    """All but those in amp_fp8, or those alone. MPT: no biases, no dropout, the table tied, Triton's flash-attention, a
    fused loss."""
    found = []
    for raw in read(data / "mpt_fsdp_steps.csv"):
        if raw["gpu"] not in PROFILES or (raw["precision"] == "amp_fp8") != float8:
            continue
        sizes = (int(raw[key]) for key in ("layers", "hidden", "heads", "sequence", "vocabulary"))
        model = Transformer(*sizes, attention="triton", bias=False, fused_loss=True)
        devices, batch = int(raw["gpus"]), int(raw["global_batch"])
        run = TrainingRun(
            batch, int(raw["micro_batch"]), devices, recompute="full" if raw["checkpointing"] == "True" else "none",
            zero=3 if raw["sharding"].startswith("FULL") else 2, precision=FP8_FSDP if float8 else FSDP, overlap=True,
            reduced="bf16" if raw["sharding"].endswith("PURE") else "fp32", software=software,
        )  # fmt: skip
        seconds = batch * model.sequence / float(raw["tokens_per_second_per_gpu"]) / devices
        workload = (raw["gpu"], raw["model"], model.sequence, devices)
        found.append(FsdpRow(model, run, seconds, workload, raw["gpu"], raw["model"]))
    return tuple(found)


def predict(chosen: Sequence[FsdpRow]) -> Floats:
    """Seconds, with the host of the profile."""
    found = []
    for row in chosen:
        hardware = load_hardware(PROFILES[row.gpu])
        found.append(predicted(row.model, row.run, hardware, host_of(hardware, row.run.software)).step_seconds)
    return np.array(found)


def tables(data: Path) -> list[str]:
    """By device generation: fitted models, then the others by number of nodes; then the rows that are far off."""
    everything = rows(data)
    seconds = predict(everything)
    plain = predict(rows(data, "kernels"))
    lines = [
        "| device | models | nodes | rows | error: mean, median, bias | worst | `kernels` |",
        "|---|---|---|--:|---|--:|--:|",
    ]
    for name, gpus in GENERATIONS.items():
        at = [i for i, r in enumerate(everything) if r.gpu in gpus and r.fitted]
        lines.append(_line(name, "fitted", "all", [everything[i] for i in at], seconds[at], plain[at]))
        for nodes in ("one", "many"):
            at = [i for i, r in enumerate(everything) if r.gpu in gpus and not r.fitted and r.nodes == nodes]
            lines.append(_line(name, "**held out**", nodes, [everything[i] for i in at], seconds[at], plain[at]))
    return [*lines, "", *_far(everything, errors(everything, seconds))]


def _line(name: str, models: str, nodes: str, chosen: Sequence[Row], seconds: Floats, plain: Floats) -> str:
    own, other = errors(chosen, seconds), errors(chosen, plain)
    worst = own[np.argmax(np.abs(own))]
    return (
        f"| {name} | {models} | {nodes} | {len(chosen)} | {percent(own)} | {worst:+.0%} | {np.abs(other).mean():.1%} |"
    )


FAR = 0.15
NAMED = 2


def _far(everything: Sequence[FsdpRow], own: Floats) -> list[str]:
    """How many rows are missed most, the worst by name: nothing is left out of the means."""
    far = sorted((abs(e), i) for i, e in enumerate(own) if abs(e) > FAR)[::-1]
    found = [
        f"{row.name} on {row.run.devices} {row.gpu.replace('_', ' ')}, sequence {row.model.sequence}, micro-batch "
        f"{row.run.micro_batch} {own[i]:+.0%}"
        for row, i in ((everything[i], i) for _, i in far[:NAMED])
    ]
    return [f"Missed by more than {FAR:.0%}: {len(far)} of {len(own)}, the farthest {'; '.join(found)}."]


TABLES = {
    "FSDP on A100 and H100": tables,
}
