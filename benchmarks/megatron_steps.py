"""vTrain's steps of Megatron-LM on 2 to 512 A100 beside what is predicted.

Nothing is fitted on the multi-node rows. On the single-node rows two numbers of the host (seconds of dispatch per
operator, and of idling per layer) are fitted to 20 runs drawn by seed, ten times; the error is on the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoshard.cluster.hardware import Hardware, load_hardware
from autoshard.estimate.layer_costs import pieces
from autoshard.estimate.stage_slots import Host
from autoshard.estimate.step import model_flops
from autoshard.estimate.transformer import TrainingRun, Transformer
from autoshard.estimate.transformer_program import build
from benchmarks.published_rows import A100, EAGER, FITTED_WIDTH, MEGATRON, VOCABULARY, Step, multi_rows, single_rows
from benchmarks.steps import (
    Floats,
    Ranking,
    errors,
    measured,
    percent,
    predicted,
    ranking,
    seconds_of,
    with_software,
)

DRAWS, CALIBRATION_RUNS = 10, 20
BASELINE_EFFICIENCY = 0.5  # the constant-efficiency baseline: model FLOPs, recomputation included, and the bubble


def baseline(rows: Sequence[Step]) -> Floats:
    """FLOPs with recomputation over half of the peak, stretched by the pipeline bubble."""
    found = []
    for row in rows:
        flops = predicted(row.model, row.run, row.hardware, Host()).flops * 4 / 3
        bubble = 1 + (row.run.pp - 1) / row.run.micro_batches
        found.append(flops / (row.run.devices * row.hardware.peak_flops("bfloat16") * BASELINE_EFFICIENCY) * bubble)
    return np.array(found)


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
    rows = single_rows(data)
    return tuple(calibrated(rows, seed) for seed in range(DRAWS))


def single_node_ranking(data: Path) -> Ranking:
    """The means over the draws, of the runs that each has not seen."""
    rows = single_rows(data)
    ranks = [ranking([rows[i] for i in draw.held_out], draw.seconds) for draw in draws_of(data)]
    return Ranking(
        float(np.mean([r.correlation for r in ranks])),
        float(np.mean([r.regret for r in ranks])),
        max(r.worst_regret for r in ranks),
        round(float(np.mean([r.workloads for r in ranks]))),
    )


def multi_node(data: Path) -> list[str]:
    """The A100 constants, the cluster's profile, and the host of the single-node runs' first calibration."""
    rows, host = multi_rows(data), draws_of(data)[0].host
    lines = [
        HEADER.format("64 to 512 A100"),
        RULE,
    ]
    own = with_software(rows, MEGATRON)
    known = {
        "autoshard, host of 20 runs": seconds_of(rows, host),
        "autoshard, `--software megatron`": seconds_of(own),
        "autoshard, host of the profile": seconds_of(rows),
        "half of peak and bubble": baseline(rows),
    }
    for name, seconds in known.items():
        lines.append(_line(name, rows, errors(rows, seconds), ranking(rows, seconds)))
    return lines


def single_node(data: Path) -> list[str]:
    """Ten calibrations of the host on 20 runs each; means over the ten, on the runs that each has not seen."""
    rows = single_rows(data)
    draws = draws_of(data)
    held = [[rows[i] for i in draw.held_out] for draw in draws]
    each = [errors(own, draw.seconds) for own, draw in zip(held, draws, strict=True)]
    spread = np.array([np.abs(e).mean() for e in each])
    dispatch = np.array([draw.host.dispatch_seconds for draw in draws])
    stalls = np.array([draw.host.stall_seconds for draw in draws])
    seconds, shipped = baseline(rows), seconds_of(rows)
    others = with_software([row for row in rows if not row.fitted], MEGATRON)
    preset = seconds_of(others)
    return [
        HEADER.format("2 to 8 A100"),
        RULE,
        _line("autoshard, host of 20 runs", held[0], np.concatenate(each), single_node_ranking(data)),
        _line("autoshard, `--software megatron`", others, errors(others, preset), ranking(others, preset)),
        _line("autoshard, host of the profile", rows, errors(rows, shipped), ranking(rows, shipped)),
        _line("half of peak and bubble", rows, errors(rows, seconds), ranking(rows, seconds)),
        "",
        f"Over the draws: error {spread.mean():.1%} ± {spread.std():.1%} ({spread.min():.1%} to {spread.max():.1%}), "
        f"dispatch {dispatch.mean() * 1e6:.0f} ± {dispatch.std() * 1e6:.0f} µs per operator, idling "
        f"{stalls.mean() * 1e3:.1f} ± {stalls.std() * 1e3:.1f} ms per layer.",
        "",
        *composed(rows, held, each),
        "",
        *recomputed(rows, load_hardware(A100)),
    ]


def composed(rows: Sequence[Step], held: Sequence[Sequence[Step]], each: Sequence[Floats]) -> list[str]:
    """How far these steps are from a sum over their layers; and the errors of what is independent in them."""
    groups: dict[tuple[object, ...], list[Step]] = defaultdict(list)
    for row in rows:
        run = row.run
        groups[row.model.hidden, run.tp, run.pp, run.dp, run.micro_batch, run.micro_batches].append(row)
    depths = [own for own in groups.values() if len(own) > 2]
    linear = [own for own in depths if own[0].run.dp == 1]
    largest = max(float(np.abs(_off_line(own)).max()) for own in linear)
    means: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for own, errors_of in zip(held, each, strict=True):
        for row, error in zip(own, errors_of, strict=True):
            means[row.model.hidden, row.run.tp, row.run.micro_batch].append(float(error))
    bias = np.array([np.mean(own) for own in means.values()])
    spread = np.array([np.std(own) for own in means.values()])
    return [
        f"These times were composed from layers, not measured as whole steps: in {len(linear)} groups of models that",
        f"differ in depth alone, they are linear in depth (to {largest:.0e}). So there are only {len(means)}",
        f"independent measurements (width, TP, micro-batch); with each counted once the error is {percent(bias)},",
        f"and rows of one of these differ by {np.median(spread):.1%} (median). The 20 runs include most of these",
        "layers; only the second row of the table, judged on other widths, is independent.",
    ]


def _off_line(rows: Sequence[Step]) -> Floats:
    """Relative distance of steps from a straight line over their layers."""
    layers, real = np.array([row.model.layers for row in rows], dtype=float), measured(rows)
    found: Floats = np.polyval(np.polyfit(layers, real, 1), layers) / real - 1
    return found


def recomputed(rows: Sequence[Step], hardware: Hardware) -> list[str]:
    """What another sequence in a micro-batch costs a layer, where the device and not the host decides."""
    lines = [
        "The source's configurations say that activations are recomputed, but the times do not show it. Milliseconds",
        "that each sequence adds to a layer (2048 wide), micro-batches of 4 to 8:",
        "",
        "| TP | measured | predicted, forward and backward | predicted, with recomputation |",
        "|--:|--:|--:|--:|",
    ]
    for tp in (1, 2, 4, 8):
        model = Transformer(2, 2048, 16, 1024, VOCABULARY, **EAGER)  # type: ignore[arg-type]
        layers = [pieces(build(model, TrainingRun(b, b, 1, tp), hardware), hardware).layer for b in SLOPE]
        both = [layer.forward_seconds + layer.backward_seconds for layer in layers]
        again = [layer.forward_seconds for layer in layers]
        kinds = (_layer_slope(rows, tp), _slope(both), _slope(both) + _slope(again))
        lines.append(f"| {tp} | {' | '.join(f'{ms:.2f}' for ms in kinds)} |")
    model = Transformer(2, 2048, 16, 1024, VOCABULARY, **EAGER)  # type: ignore[arg-type]
    flops = 4 / 3 * (model_flops(model, TrainingRun(1, 1)) - 6.0 * model.sequence * model.hidden * VOCABULARY) / 2
    return [
        *lines,
        "",
        f"With recomputation, TP 1 would reach {flops / _layer_slope(rows, 1) / 1e9:.0f} TFLOP/s, unfused attention",
        "and dropout included; A100's best matmuls alone reach 290. So the steps are predicted without. The",
        "vocabulary of 50,257 words is not padded, so rows of logits are misaligned and slow (`matmul.misaligned`):",
        f"the head of a model {FITTED_WIDTH * 2} wide takes {_head_ms(rows, 1):.1f} ms a sequence at TP 1, and",
        f"{_head_ms(rows, 2):.1f} ms at TP 2.",
    ]


def _head_ms(rows: Sequence[Step], tp: int, width: int = 2 * FITTED_WIDTH) -> float:
    """What the ends of the model take for each sequence more in a micro-batch."""
    return 1e3 * head_slope(rows, width, tp)


def head_slope(rows: Sequence[Step], width: int, tp: int) -> float:
    """Seconds: a step of one replica is slots x layers, micro-batches x ends, and what it does once."""
    ends: dict[int, float] = {}
    for size in sorted({row.run.micro_batch for row in rows}):
        own = [r for r in rows if (r.model.hidden, r.run.tp, r.run.dp, r.run.micro_batch) == (width, tp, 1, size)]
        parts = [(r.model.layers / r.run.pp, r.run.micro_batches, r.run.pp) for r in own]
        table = np.array([((count + pp - 1) * layers, count, 1.0, layers) for layers, count, pp in parts])
        if len(own) >= HEAD_ROWS:
            ends[size] = float(np.linalg.lstsq(table, measured(own), rcond=None)[0][1])
    return float(np.polyfit(list(ends), list(ends.values()), 1)[0])


HEAD_ROWS = 8  # at least, for four numbers


SLOPE = (4, 8)  # sequences in a micro-batch


def _slope(seconds: Sequence[float]) -> float:
    """Milliseconds for each sequence more."""
    return (seconds[1] - seconds[0]) / (SLOPE[1] - SLOPE[0]) * 1e3


def _layer_slope(rows: Sequence[Step], tp: int) -> float:
    """A step is (micro-batches + PP - 1) layers / PP times a layer, and what does not depend on the layers."""
    found = []
    for size in SLOPE:
        groups: dict[tuple[int, int], list[Step]] = defaultdict(list)
        for row in rows:
            if (row.model.hidden, row.run.tp, row.run.micro_batch) == (2048, tp, size):
                groups[row.run.pp, row.run.micro_batches].append(row)
        known = [g for g in groups.values() if len({row.model.layers for row in g}) > 1]
        found.append(float(np.mean([_per_layer(g) for g in known])))
    return _slope(found)


def _per_layer(rows: Sequence[Step]) -> float:
    run = rows[0].run
    layers = np.array([(run.micro_batches + run.pp - 1) * row.model.layers / run.pp for row in rows])
    return float(np.polyfit(layers, measured(rows), 1)[0])


HEADER = "| {} | rows | error: mean, median, bias | rank correlation | regret: mean, worst | workloads |"
RULE = "|---|--:|---|--:|---|--:|"


def _line(name: str, rows: Sequence[Step], found: Floats, ranks: Ranking) -> str:
    return (
        f"| {name} | {len(rows)} | {percent(found)} | {ranks.correlation:.2f} | {ranks.regret:.1%}, "
        f"{ranks.worst_regret:.1%} | {ranks.workloads} |"
    )


TABLES = {
    "Training steps on 64 to 512 A100": multi_node,
    "Training steps on 2 to 8 A100": single_node,
}
