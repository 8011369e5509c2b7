"""BLOOM's plans beside `autoshard estimate`: seconds, their order, and memory. No second is fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.best_runs import best_runs
from autoshard.estimate.run_space import RunSpace
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.step_corrections.software import held_bytes
from benchmarks.published_rows import BLOOM_CLUSTER, Step, bloom
from benchmarks.steps import (
    GIB,
    correlation,
    errors,
    measured,
    percent,
    predicted_of,
    seconds_of,
    table,
    with_software,
)

AS_RUN = {"recompute": "full", "zero": 1, "interleave": 1, "sequence_parallel": False}  # what all runs have
RANKED = ("181B", "02-25")  # the plans of one model on one cluster and one day
SEEN = ("fp16", 14336)  # precision and width of the runs that `outside` of DeepSpeed's memory is the median of


def averaged(rows: Sequence[Step]) -> list[Step]:
    """Rows of the same run are one, with the mean of their seconds."""
    groups: dict[tuple[Transformer, TrainingRun], list[Step]] = {}
    for row in rows:
        groups.setdefault((row.model, row.run), []).append(row)
    return [replace(g[0], measured_seconds=float(np.mean(measured(g)))) for g in groups.values()]


def bloom_plans(data: Path) -> list[str]:
    """The plans of one day, one by one and ranked; then all of its rows."""
    everything = bloom(data)
    chosen = averaged([row for row in everything if row.workload == RANKED and not row.full])
    others = averaged([row for row in everything if row.workload != RANKED and not row.full])
    samples = np.array([row.run.batch for row in chosen])
    each, real = seconds_of(chosen) / samples, measured(chosen) / samples
    lines = table("dp x tp x pp, micro-batch", "measured ms a sequence", "predicted", "error")
    for row, own, other in zip(chosen, each, real, strict=True):
        lines.append(f"| {_split(row.run)} | {other * 1e3:.1f} | {own * 1e3:.1f} | {own / other - 1:+.1%} |")
    regret = float(real[np.argmin(each)] / real.min() - 1)
    return [
        *lines,
        "",
        f"Error {percent(each / real - 1)} (mean, median, bias), rank correlation {correlation(real, each):.2f}, "
        f"regret {regret:.1%}.",
        f"The other {len(others)} runs, of all days and models: error {percent(errors(others))}.",
        "",
        *_chosen_freely(chosen, each, real),
        "",
        *_out_of_memory(everything),
        "",
        *_reported_memory([row for row in everything if row.memory_gb > 0]),
    ]


def _split(run: TrainingRun) -> str:
    return f"{run.dp} x {run.tp} x {run.pp}, {run.micro_batch}"


def _chosen_freely(rows: Sequence[Step], each: np.ndarray, real: np.ndarray) -> list[str]:
    """The best of all plans of that space, beside the fastest of those that were measured: seconds a sequence."""
    fastest = int(real.argmin())
    row, batch = rows[fastest], rows[fastest].run.batch
    found = best_runs(RunSpace(row.model, row.run, row.run.devices, AS_RUN), row.hardware, 1)
    own, run = found.best[0].step_seconds / batch, found.best[0].run
    again = [
        other for kept, other in zip(rows, real, strict=True)
        if replace(kept.run, batch=batch, schedule=run.schedule) == run
    ]  # fmt: skip
    known = f"measured: {again[0] * 1e3:.1f} ms" if again else "not measured"
    return [
        f"`estimate` would choose {_split(run)} among the {found.fitting} plans of this space that fit: "
        f"{own * 1e3:.1f} ms a sequence ({known}). It predicts {each[fastest] / own - 1:.1%} more for the fastest that "
        f"was measured, {_split(row.run)}."
    ]


def _out_of_memory(everything: Sequence[Step]) -> list[str]:
    """Which plans are predicted not to fit, beside those that ran out."""
    room = load_hardware(BLOOM_CLUSTER).usable_memory_bytes
    found = [(row.full, predicted_of(row).memory.peak > room) for row in everything]
    ran_out, fitted = [own for full, own in found if full], [own for full, own in found if not full]
    return [
        f"Predicted not to fit: {sum(ran_out)} of the {len(ran_out)} runs that ran out of memory, and {sum(fitted)} of "
        f"the {len(fitted)} that fitted."
    ]


def _reported_memory(rows: Sequence[Step]) -> list[str]:
    """What the source reports, beside what is predicted, with Megatron's states and with DeepSpeed's."""
    groups: dict[str, list[Step]] = {"fp16, fitted": [], "fp16, **held out**": [], "bf16, **held out**": []}
    for row in rows:
        seen = (row.run.precision, row.model.hidden) == SEEN and row.run.zero == 1
        groups[f"{row.run.precision}, {'fitted' if seen else '**held out**'}"].append(row)
    lines = [
        "Reported memory includes context, communicators and the allocator. `--software deepspeed` counts",
        "DeepSpeed's optimizer states, ZeRO buckets, inputs and outputs of stages that DeepSpeed keeps, and a constant",
        "for all that is not modelled, the median of measured minus modelled in the",
        f"{SEEN[0]} runs {SEEN[1]} wide (first row). Mean, median, bias:",
        "",
        "| runs | rows | error, `kernels` | error, `deepspeed` | not modelled, median GiB |",
        "|---|--:|---|---|--:|",
    ]
    for name, own in groups.items():
        if own:
            real = np.array([row.memory_gb * GIB for row in own])
            both = (with_software(own, "kernels"), own)
            before, after = (np.array([predicted_of(row).memory.peak for row in some]) for some in both)
            outside = held_bytes("deepspeed", own[0].run.precision).outside
            beside = float(np.median(real - after + outside)) / GIB
            lines.append(
                f"| {name} | {len(own)} | {percent(before / real - 1)} | {percent(after / real - 1)} | {beside:.1f} |"
            )
    return lines


TABLES = {
    "BLOOM's plans": bloom_plans,
}
