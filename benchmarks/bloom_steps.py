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
from benchmarks import steps
from benchmarks.published_rows import BLOOM_CLUSTER, Step, bloom
from benchmarks.steps import GIB, Cells, Figures, errors, measured, percent, seconds_of

AS_RUN = {"recompute": "full", "zero": 1, "interleave": 1, "sequence_parallel": False}  # what all runs have
RANKED = ("181B", "02-25")  # the plans of one model on one cluster and one day
SEEN = ("fp16", 14336)  # precision and width of the runs that `outside` of DeepSpeed's memory is the median of


def averaged(rows: Sequence[Step]) -> list[Step]:
    """Rows of the same run are one, with the mean of their seconds."""
    groups: dict[tuple[Transformer, TrainingRun], list[Step]] = {}
    for row in rows:
        groups.setdefault((row.model, row.run), []).append(row)
    return [replace(g[0], measured_seconds=float(np.mean(measured(g)))) for g in groups.values()]


def bloom_plans(data: Path) -> Figures:
    """The plans of one day, one by one and ranked; then all of its rows."""
    everything = bloom(data)
    chosen = averaged([row for row in everything if row.workload == RANKED and not row.full])
    others = averaged([row for row in everything if row.workload != RANKED and not row.full])
    samples = np.array([row.run.batch for row in chosen])
    each, real = seconds_of(chosen) / samples, measured(chosen) / samples
    return {
        "rows": list(zip([_split(row.run) for row in chosen], each, real, strict=True)),
        "errors": each / real - 1,
        "correlation": steps.correlation(real, each),
        "regret": float(real[np.argmin(each)] / real.min() - 1),
        "others": errors(others),
        "chosen": _chosen_freely(chosen, each, real),
        **_out_of_memory(everything),
        "seen": SEEN,
        "memory": _reported_memory([row for row in everything if row.memory_gb > 0]),
    }


def _split(run: TrainingRun) -> str:
    return f"{run.dp} x {run.tp} x {run.pp}, {run.micro_batch}"


def _chosen_freely(rows: Sequence[Step], each: np.ndarray, real: np.ndarray) -> Figures:
    """The best of all plans of that space, beside the fastest of those that were measured: seconds a sequence."""
    fastest = int(real.argmin())
    row, batch = rows[fastest], rows[fastest].run.batch
    result = best_runs(RunSpace(row.model, row.run, row.run.devices, AS_RUN), row.hardware, 1)
    seconds, run = result.best[0].step_seconds / batch, result.best[0].run
    matches = [
        other for step, other in zip(rows, real, strict=True)
        if replace(step.run, batch=batch, schedule=run.schedule) == run
    ]  # fmt: skip
    return {
        "split": _split(run),
        "fitting": result.fitting,
        "own": seconds * 1e3,
        "known": f"measured: {matches[0] * 1e3:.1f} ms" if matches else "not measured",
        "more": each[fastest] / seconds - 1,
        "fastest": _split(row.run),
    }


def _out_of_memory(everything: Sequence[Step]) -> Figures:
    """Which plans are predicted not to fit, beside those that ran out."""
    room = load_hardware(BLOOM_CLUSTER).usable_memory_bytes
    plans = [(row.full, steps.predicted_of(row).memory.peak > room) for row in everything]
    return {"ran_out": [over for full, over in plans if full], "fitted": [over for full, over in plans if not full]}


def _reported_memory(rows: Sequence[Step]) -> list[Cells]:
    """What the source reports, beside what is predicted, with Megatron's states and with DeepSpeed's."""
    groups: dict[str, list[Step]] = {"fp16, fitted": [], "fp16, **held out**": [], "bf16, **held out**": []}
    for row in rows:
        seen = (row.run.precision, row.model.hidden) == SEEN and row.run.zero == 1
        groups[f"{row.run.precision}, {'fitted' if seen else '**held out**'}"].append(row)
    cells: list[Cells] = []
    for name, group in groups.items():
        if group:
            real = np.array([row.memory_gb * GIB for row in group])
            both = (steps.with_software(group, "kernels"), group)
            before, after = (np.array([steps.predicted_of(row).memory.peak for row in some]) for some in both)
            outside = held_bytes("deepspeed", group[0].run.precision).outside
            beside = float(np.median(real - after + outside)) / GIB
            errors_of = (percent(held / real - 1) for held in (before, after))
            cells.append((name, len(group), *errors_of, f"{beside:.1f}"))
    return cells


TABLES = {
    "BLOOM's plans": bloom_plans,
}
