"""Steps of Megatron-LM on A100 compared with what is predicted: vTrain's on 2 to 512, and BLOOM's plans.

Nothing is fitted on the multi-node rows and BLOOM's. On the single-node rows two numbers of the host (seconds of
dispatch per operator, and of idling per layer) are fitted to 20 runs drawn by seed, ten times; the error is on the
others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoshard.cluster.hardware import load_hardware
from autoshard.estimate.best_runs import best_runs
from autoshard.estimate.run_space import RunSpace
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.step_corrections.software import held_bytes
from benchmarks import published_rows as runs
from benchmarks.published_rows import Cells, Figures, Floats, Step, errors, measured, ranking, seconds_of

DRAWS, CALIBRATION_RUNS = 10, 20
BASELINE_EFFICIENCY = 0.5  # the constant-efficiency baseline: model FLOPs, recomputation included, and the bubble


def baseline(rows: Sequence[Step]) -> Floats:
    """FLOPs with recomputation over half of the peak, stretched by the pipeline bubble."""
    seconds = []
    for row in rows:
        flops = runs.predicted(row.model, row.run, row.hardware, Host()).flops * 4 / 3
        bubble = 1 + (row.run.pp - 1) / row.run.micro_batches
        seconds.append(flops / (row.run.devices * row.hardware.peak_flops("bfloat16") * BASELINE_EFFICIENCY) * bubble)
    return np.array(seconds)


# --- the host, fitted to a few runs ---------------------------------------------------------------------------------

DISPATCH_SECONDS = tuple(float(seconds) for seconds in np.arange(20e-6, 141e-6, 5e-6))
STALL_SECONDS = tuple(float(seconds) for seconds in np.arange(0.0, 2.1e-3, 0.3e-3))


@dataclass(frozen=True, eq=False)
class Draw:
    """A calibration: the host it gave, and the predictions of the rows that it did not see."""

    host: Host
    held_out: NDArray[np.int64]
    seconds: Floats


def calibrated(rows: Sequence[Step], seed: int) -> Draw:
    """The host of a grid with the least mean absolute error on 20 runs."""
    order = np.random.default_rng(seed).permutation(len(rows))
    seen, held_out = [rows[i] for i in order[:CALIBRATION_RUNS]], np.sort(order[CALIBRATION_RUNS:])
    hosts = [Host(dispatch, stall_seconds=stall) for dispatch in DISPATCH_SECONDS for stall in STALL_SECONDS]
    best = min(hosts, key=lambda host: float(np.abs(errors(seen, seconds_of(seen, host))).mean()))
    return Draw(best, held_out, seconds_of([rows[i] for i in held_out], best))


# --- tables ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def draws_of(data: Path) -> tuple[Draw, ...]:
    """Ten calibrations on 20 single-node runs each."""
    rows = runs.single_rows(data)
    return tuple(calibrated(rows, seed) for seed in range(DRAWS))


def single_node_ranking(data: Path) -> runs.Ranking:
    """The means over the draws, of the runs that each has not seen."""
    rows = runs.single_rows(data)
    ranks = [astuple(ranking([rows[i] for i in draw.held_out], draw.seconds)) for draw in draws_of(data)]
    correlation, regret, _, several = map(float, np.mean(ranks, axis=0))
    return runs.Ranking(correlation, regret, max(worst for _, _, worst, _ in ranks), round(several))


def multi_node(data: Path) -> Figures:
    """The A100 constants, the cluster's profile, and the host of the single-node runs' first calibration."""
    rows, host = runs.multi_rows(data), draws_of(data)[0].host
    preset_rows = runs.with_software(rows, runs.MEGATRON)
    known = {
        "autoshard, host of 20 runs": seconds_of(rows, host),
        "autoshard, `--software megatron`": seconds_of(preset_rows),
        "autoshard, host of the profile": seconds_of(rows),
        "half of peak and bubble": baseline(rows),
    }
    return {"rows": [_line(name, rows, errors(rows, times), ranking(rows, times)) for name, times in known.items()]}


def single_node(data: Path) -> Figures:
    """Ten calibrations of the host on 20 runs each; means over the ten, on the runs that each has not seen."""
    rows = runs.single_rows(data)
    draws = draws_of(data)
    held = [[rows[i] for i in draw.held_out] for draw in draws]
    each = [errors(held_rows, draw.seconds) for held_rows, draw in zip(held, draws, strict=True)]
    seconds, shipped = baseline(rows), seconds_of(rows)
    others = runs.with_software([row for row in rows if not row.fitted], runs.MEGATRON)
    preset = seconds_of(others)
    hosts = [draw.host for draw in draws]
    return {
        "rows": [
            _line("autoshard, host of 20 runs", held[0], np.concatenate(each), single_node_ranking(data)),
            _line("autoshard, `--software megatron`", others, errors(others, preset), ranking(others, preset)),
            _line("autoshard, host of the profile", rows, errors(rows, shipped), ranking(rows, shipped)),
            _line("half of peak and bubble", rows, errors(rows, seconds), ranking(rows, seconds)),
        ],
        "spread": np.array([np.abs(e).mean() for e in each]),
        "dispatch": np.array([host.dispatch_seconds for host in hosts]) * 1e6,
        "stalls": np.array([host.stall_seconds for host in hosts]) * 1e3,
        "composed": composed(rows, held, each),
        "width": 2 * runs.FITTED_WIDTH,
        # milliseconds that the ends of the model take for each sequence more in a micro-batch
        "heads": [1e3 * head_slope(rows, 2 * runs.FITTED_WIDTH, tp) for tp in (1, 2)],
    }


def composed(rows: Sequence[Step], held: Sequence[Sequence[Step]], each: Sequence[Floats]) -> Figures:
    """How far these steps are from a sum over their layers; and the errors of what is independent in them."""
    groups: dict[tuple[object, ...], list[Step]] = defaultdict(list)
    for row in rows:
        run = row.run
        groups[row.model.hidden, run.tp, run.pp, run.dp, run.micro_batch, run.micro_batches].append(row)
    depths = [group for group in groups.values() if len(group) > 2]
    linear = [group for group in depths if group[0].run.dp == 1]
    means: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for held_rows, errors_of in zip(held, each, strict=True):
        for row, error in zip(held_rows, errors_of, strict=True):
            means[row.model.hidden, row.run.tp, row.run.micro_batch].append(float(error))
    return {
        "groups": len(linear),
        "off_line": max(float(np.abs(_off_line(group)).max()) for group in linear),
        "bias": np.array([np.mean(values) for values in means.values()]),
        "spread": np.median([np.std(values) for values in means.values()]),
    }


def _off_line(rows: Sequence[Step]) -> Floats:
    """Relative distance of steps from a straight line over their layers."""
    layers, real = np.array([row.model.layers for row in rows], dtype=float), measured(rows)
    return np.polyval(np.polyfit(layers, real, 1), layers) / real - 1


def head_slope(rows: Sequence[Step], width: int, tp: int) -> float:
    """Seconds: a step of one replica is slots x layers, micro-batches x ends, and what it does once."""
    ends: dict[int, float] = {}
    for size in sorted({row.run.micro_batch for row in rows}):
        same_size = [r for r in rows if (r.model.hidden, r.run.tp, r.run.dp, r.run.micro_batch) == (width, tp, 1, size)]
        parts = [(r.model.layers / r.run.pp, r.run.micro_batches, r.run.pp) for r in same_size]
        table = np.array([((count + pp - 1) * layers, count, 1.0, layers) for layers, count, pp in parts])
        if len(same_size) >= HEAD_ROWS:
            ends[size] = float(np.linalg.lstsq(table, measured(same_size), rcond=None)[0][1])
    return float(np.polyfit(list(ends), list(ends.values()), 1)[0])


HEAD_ROWS = 8  # at least, for four numbers


def _line(name: str, rows: Sequence[Step], deviations: Floats, ranks: runs.Ranking) -> Cells:
    regrets = f"{ranks.regret:.1%}, {ranks.worst_regret:.1%}"
    return name, len(rows), runs.percent(deviations), f"{ranks.correlation:.2f}", regrets, ranks.workloads


# --- BLOOM's plans: seconds, their order, and memory ------------------------------------------------------------------

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
    everything = runs.bloom(data)
    chosen = averaged([row for row in everything if row.workload == RANKED and not row.full])
    others = averaged([row for row in everything if row.workload != RANKED and not row.full])
    samples = np.array([row.run.batch for row in chosen])
    each, real = seconds_of(chosen) / samples, measured(chosen) / samples
    return {
        "rows": list(zip([_split(row.run) for row in chosen], each, real, strict=True)),
        "errors": each / real - 1,
        "correlation": runs.correlation(real, each),
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
    """The best of all plans of that space and the fastest of those that were measured: seconds a sequence."""
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
    """Which plans are predicted not to fit, and those that ran out."""
    room = load_hardware(runs.BLOOM_CLUSTER).usable_memory_bytes
    plans = [(row.full, runs.predicted_of(row).memory.peak > room) for row in everything]
    return {"ran_out": [over for full, over in plans if full], "fitted": [over for full, over in plans if not full]}


def _reported_memory(rows: Sequence[Step]) -> list[Cells]:
    """What the source reports and what is predicted, with Megatron's states and with DeepSpeed's."""
    groups: dict[str, list[Step]] = {"fp16, fitted": [], "fp16, **held out**": [], "bf16, **held out**": []}
    for row in rows:
        seen = (row.run.precision, row.model.hidden) == SEEN and row.run.zero == 1
        groups[f"{row.run.precision}, {'fitted' if seen else '**held out**'}"].append(row)
    cells: list[Cells] = []
    for name, group in groups.items():
        if group:
            real = np.array([row.memory_gb * runs.GIB for row in group])
            both = (runs.with_software(group, "kernels"), group)
            before, after = (np.array([runs.predicted_of(row).memory.peak for row in some]) for some in both)
            outside = held_bytes("deepspeed", group[0].run.precision).outside
            beside = float(np.median(real - after + outside)) / runs.GIB
            errors_of = (runs.percent(held / real - 1) for held in (before, after))
            cells.append((name, len(group), *errors_of, f"{beside:.1f}"))
    return cells


TABLES = {
    "Training steps on 64 to 512 A100": multi_node,
    "Training steps on 2 to 8 A100": single_node,
    "BLOOM's plans": bloom_plans,
}
