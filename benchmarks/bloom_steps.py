"""BLOOM's plans beside `autoshard estimate`: seconds, their order, and memory. No second is fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.best_runs import best_runs
from autoshard.estimate.run_space import RunSpace
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.whole_steps.software import held_bytes
from benchmarks.measurements import read
from benchmarks.steps import EAGER, GIB, NamedRow, correlation, errors, measured, percent, predicted_of, seconds_of

SEQUENCE = 2048
BLOOM_VOCABULARY = 250_880
CLUSTER = "a100-80g-sxm-4opa"  # with the network that was measured there
AS_RUN = {"recompute": "full", "zero": 1, "interleave": 1, "sequence_parallel": False}  # what all runs have
RANKED = ("181B", "02-25")  # the plans of one model on one cluster and one day


@lru_cache(maxsize=4)
def bloom(data: Path) -> tuple[tuple[NamedRow, str, bool], ...]:
    """Rows, the day of each, and whether it ran out of memory; full recomputation and eager attention are assumed."""
    hardware, found = load_hardware(CLUSTER), []
    for raw in read(data / "bloom_steps.csv"):
        if not raw["dp"]:
            continue  # one node: the replicas are not stated
        shape = (int(raw[key]) for key in ("layers", "hidden", "heads"))
        model = Transformer(*shape, SEQUENCE, BLOOM_VOCABULARY, **EAGER)  # type: ignore[arg-type]
        sizes = (int(raw[key]) for key in ("global_batch", "micro_batch", "dp", "tp", "pp"))
        run = TrainingRun(*sizes, recompute="full", zero=int(raw["zero"] or 1), precision=raw["dtype"],
                          software="deepspeed")  # fmt: skip
        if run.batch % (run.micro_batch * run.dp) or model.heads % run.tp:
            continue
        full = "OOM" in (raw["memory_gb"], raw["note"])
        seconds = float("nan") if full or raw["step_seconds"] in ("", "x") else float(raw["step_seconds"])
        memory = float(raw["memory_gb"]) if raw["memory_gb"].isdigit() else float("nan")
        name = f"{raw['size']} {model.layers}x{model.hidden}, {model.heads} heads"
        row = NamedRow(model, run, seconds, (raw["size"], raw["note"]), name, hardware, memory)
        found.append((row, raw["note"], full or not seconds > 0))
    return tuple(found)


def averaged(rows: Sequence[NamedRow]) -> list[NamedRow]:
    """Rows of the same run are one, with the mean of their seconds."""
    groups: dict[tuple[Transformer, TrainingRun], list[NamedRow]] = {}
    for row in rows:
        groups.setdefault((row.model, row.run), []).append(row)
    return [replace(g[0], measured_seconds=float(np.mean([r.measured_seconds for r in g]))) for g in groups.values()]


def bloom_plans(data: Path) -> list[str]:
    """The plans of one day, one by one and ranked; then all of its rows."""
    everything = bloom(data)
    size, day = RANKED
    chosen = averaged([row for row, note, full in everything if row.workload == (size, day) and not full])
    others = averaged([row for row, note, full in everything if row.workload != (size, day) and not full])
    seconds = seconds_of(chosen)
    samples = np.array([row.run.batch for row in chosen])
    each, real = seconds / samples, measured(chosen) / samples
    lines = [
        "| dp x tp x pp, micro-batch | measured ms a sequence | predicted | error |",
        "|---|--:|--:|--:|",
    ]
    for row, own, other in zip(chosen, each, real, strict=True):
        run = row.run
        lines.append(
            f"| {run.dp} x {run.tp} x {run.pp}, {run.micro_batch} | {other * 1e3:.1f} | {own * 1e3:.1f} | "
            f"{own / other - 1:+.1%} |"
        )
    regret = float(real[np.argmin(each)] / real.min() - 1)
    rest = seconds_of(others)
    return [
        *lines,
        "",
        f"Error {percent(each / real - 1)} (mean, median, bias), rank correlation {correlation(real, each):.2f}, "
        f"regret {regret:.1%}.",
        f"The other {len(others)} runs, of all days and models: error {percent(errors(others, rest))}.",
        "",
        *_chosen_freely(chosen, each, real),
        "",
        *_out_of_memory(everything),
        "",
        *_reported_memory([row for row, _, _ in everything if row.memory_gb > 0]),
    ]


def _chosen_freely(rows: Sequence[NamedRow], each: np.ndarray, real: np.ndarray) -> list[str]:
    """The best of all plans of that space, beside the fastest of those that were measured: seconds a sequence."""
    fastest = int(real.argmin())
    row, batch = rows[fastest], rows[fastest].run.batch
    found = best_runs(RunSpace(row.model, row.run, row.run.devices, AS_RUN), row.hardware, 1)
    best = found.best[0]
    own, run = best.step_seconds / batch, best.run
    again = [
        other for kept, other in zip(rows, real, strict=True)
        if replace(kept.run, batch=batch, schedule=run.schedule) == run
    ]  # fmt: skip
    told = f"measured: {again[0] * 1e3:.1f} ms" if again else "not measured"
    plan, other = (f"{r.dp} x {r.tp} x {r.pp}, {r.micro_batch}" for r in (run, row.run))
    return [
        f"`estimate` would choose {plan} among the {found.fitting} plans of this space that fit: {own * 1e3:.1f} ms a "
        f"sequence ({told}). It predicts {each[fastest] / own - 1:.1%} more for the fastest that was measured, {other}."
    ]


def _out_of_memory(everything: Sequence[tuple[NamedRow, str, bool]]) -> list[str]:
    """Which plans are predicted not to fit, beside those that ran out."""
    room = load_hardware(CLUSTER).usable_memory_bytes
    found = [(full, predicted_of(row).memory.peak > room) for row, _, full in everything]
    ran_out, fitted = [own for full, own in found if full], [own for full, own in found if not full]
    return [
        f"Among {len(ran_out)} runs that ran out of memory, {sum(ran_out)} are predicted not to fit; of "
        f"{len(fitted)} that "
        f"did not, {sum(fitted)} are predicted not to fit."
    ]


SEEN = ("fp16", 14336)  # precision and width of the runs that `outside` of DeepSpeed's memory is the median of


def _reported_memory(rows: Sequence[NamedRow]) -> list[str]:
    """What the source reports, beside what is predicted, with Megatron's states and with DeepSpeed's."""
    groups: dict[str, list[NamedRow]] = {"fp16, fitted": [], "fp16, **held out**": [], "bf16, **held out**": []}
    for row in rows:
        seen = (row.run.precision, row.model.hidden) == SEEN and row.run.zero == 1
        groups[f"{row.run.precision}, {'fitted' if seen else '**held out**'}"].append(row)
    lines = [
        "Reported memory includes context, communicators and the allocator. `--software deepspeed` adds the states,",
        "buckets and ends of stages that DeepSpeed holds, and one fitted figure for other use, the median of the",
        f"{SEEN[0]} runs {SEEN[1]} wide. Mean, median, bias:",
        "",
        "| runs | rows | Megatron's states | `--software deepspeed` | other use, GiB |",
        "|---|--:|---|---|--:|",
    ]
    for name, own in groups.items():
        if own:
            real = np.array([row.memory_gb * GIB for row in own])
            plain = [replace(row, run=replace(row.run, software="kernels")) for row in own]
            before, after = (np.array([predicted_of(row).memory.peak for row in some]) for some in (plain, own))
            told = held_bytes("deepspeed", own[0].run.precision).outside
            beside = float(np.median(real - after + told)) / GIB
            lines.append(
                f"| {name} | {len(own)} | {percent(before / real - 1)} | {percent(after / real - 1)} | {beside:.1f} |"
            )
    return lines
