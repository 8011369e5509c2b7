"""Published training steps beside what `autoshard estimate` predicts: what all tables share."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from autoshard.cluster.hardware import Hardware
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import Estimate, estimate, host_of
from autoshard.estimate.transformer import TrainingRun, Transformer
from benchmarks import harness
from benchmarks import published_rows as runs
from benchmarks.published_rows import Step

Floats = NDArray[np.float64]
GIB = 2**30
WIDTH = 118  # of the page
Cells = tuple[object, ...]
Figures = dict[str, Any]  # what a part of validation.md.j2 says


@lru_cache(maxsize=65536)
def predicted(model: Transformer, run: TrainingRun, hardware: Hardware, host: Host) -> Estimate:
    return estimate(model, run, hardware, host)


def predicted_of(row: Step, host: Host | None = None) -> Estimate:
    """With a host, or that of its profile or software."""
    return predicted(row.model, row.run, row.hardware, host or host_of(row.hardware, row.run.software))


def seconds_of(rows: Sequence[Step], host: Host | None = None) -> Floats:
    """Half of the layers computed again is the mean of none and all."""
    return np.array([np.mean([predicted_of(step, host).step_seconds for step in both_ways(row)]) for row in rows])


def both_ways(row: Step) -> list[Step]:
    kinds = ("none", "full") if row.again == "half" else (row.run.recompute,)
    return [replace(row, run=replace(row.run, recompute=kind)) for kind in kinds]


def that_ran(data: Path) -> dict[str, list[Step]]:
    """By table, the runs that ran, so that they must fit. Half of the layers computed again lies between none and all:
    all is what is known to fit."""
    return {
        "NVIDIA's recipes": list(runs.nvidia(data)),
        "MindSpeed-LLM 1.0.RC3, 910B": list(runs.mindspeed(data)),
        "MindSpeed-LLM 1.0.RC1, MindFormers": list(runs.ascend()),
        "Megatron-Core on B200": list(runs.b200(data)),
        "Megatron-Core on H100": list(runs.published("megatron_core")),
        "BLOOM's plans": [row for row in runs.bloom(data) if not row.full],
        "torchtitan and fms-fsdp": [both_ways(row)[-1] for row in runs.fsdp_runs()],
        "torchtitan in float8": list(runs.published("float8")),
        "MPT by FSDP": list(runs.mpt(data)),
        "Megatron-LM on A100": [
            *runs.single_rows(data),
            *runs.published("scaling"),
            *runs.published("selective"),
        ],
    }


def measured(rows: Sequence[Step]) -> Floats:
    return np.array([row.measured_seconds for row in rows])


def errors(rows: Sequence[Step], seconds: Floats | None = None) -> Floats:
    """Of `seconds`, or of what is predicted."""
    return (seconds_of(rows) if seconds is None else seconds) / measured(rows) - 1


def with_software(rows: Sequence[Step], software: str) -> list[Step]:
    return [replace(row, run=replace(row.run, software=software)) for row in rows]


@dataclass(frozen=True)
class Ranking:
    """Of workloads with at least three measured splits: the mean rank correlation, and how much slower than the best
    measured split the one is that the prediction would pick."""

    correlation: float
    regret: float
    worst_regret: float
    workloads: int


def workloads(rows: Sequence[Step]) -> list[NDArray[np.int64]]:
    """Positions of the rows of each workload with at least three splits."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.workload].append(index)
    return [np.array(group) for group in groups.values() if len(group) >= 3]


def ranking(rows: Sequence[Step], seconds: Floats) -> Ranking:
    real, several = measured(rows), workloads(rows)
    correlations = [correlation(real[group], seconds[group]) for group in several]
    regrets = [float(real[group][np.argmin(seconds[group])] / real[group].min() - 1) for group in several]
    return Ranking(float(np.nanmean(correlations)), float(np.mean(regrets)), max(regrets), len(several))


def correlation(real: Floats, seconds: Floats) -> float:
    """Of the ranks; NaN where all are predicted alike."""
    return float(spearmanr(real, seconds).statistic) if np.ptp(seconds) > 0 else float("nan")


# --- tables ---------------------------------------------------------------------------------------------------------


def off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}"


def percent(values: Floats) -> str:
    return f"{np.abs(values).mean():.1%} / {np.median(np.abs(values)):.1%} / {values.mean():+.1%}"


def section(title: str, figures: Mapping[str, object]) -> list[str]:
    """The lines of a part of validation.md.j2: sentences in lines of one width, tables as they are."""
    head, *parts = (harness.ROOT / "benchmarks" / "validation.md.j2").read_text(encoding="utf-8").split("\n## ")
    part = next(text for text in parts if text.startswith(f"{title}\n")).removeprefix(f"{title}\n")
    harness.JINJA.filters |= {"percent": percent, "off": off}
    harness.JINJA.globals["abs"] = np.abs
    lines = list[str]()
    rendered = harness.JINJA.from_string(f"{head}\n{part}").render(figures).strip().splitlines()
    for plain, group in groupby(rendered, lambda line: bool(line) and line[0] != "|"):
        block = list(group)
        lines += textwrap.wrap(" ".join(block), WIDTH, break_on_hyphens=False) if plain else block
    return lines
