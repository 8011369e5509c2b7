"""The best configurations as a table, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.estimate.best_runs import BestRuns
from autoshard.estimate.step import Estimate
from autoshard.estimate.text.estimate_text import as_dict as estimate_dict
from autoshard.estimate.transformer import PRECISIONS
from autoshard.search.pareto_front import Point, plot
from autoshard.units import format_bytes, format_seconds

_WIDTHS = {
    "tp": 4, "seq": 4, "dp": 6, "cp": 4, "ep": 5, "pp": 5, "chunks": 7, "micro": 6, "recompute": 10, "zero": 5,
    "step": 10, "of peak": 8, "memory": 10,
}  # fmt: skip


def text(runs: BestRuns, hardware: Hardware) -> str:
    """One row per configuration, fastest first, and how certain it is that none is missing."""
    first = runs.best[0]
    return "\n".join(
        [
            f"transformer of {first.parameters / 1e9:.4g} billion parameters, {first.run.batch} sequences a step on "
            f"{first.run.devices} devices of {hardware.name}",
            "",
            *_table(runs.best, hardware),
            "",
            *_first(first),
            f"error band of the first {first.band}",
            *_certainty(runs),
            *_front(runs.front, hardware),
        ]
    )


def _front(front: Sequence[Estimate], hardware: Hardware) -> list[str]:
    message = "time against memory: no configuration of the space is better in both than"
    return ["", message, *_table(front, hardware)] if front else []


def front_picture(runs: BestRuns, hardware: Hardware) -> str:
    """The front and the fastest as an SVG."""
    shown = dict.fromkeys((*runs.front, *runs.best))
    points = [Point(item.step_seconds, item.memory.peak, item.step_seconds, True, item in runs.front) for item in shown]
    first = runs.best[0]
    title = f"{first.parameters / 1e9:.4g} billion parameters, {first.run.devices} x {hardware.name}"
    return plot(tuple(sorted(points, key=lambda point: point.predicted_seconds)), title)


def _table(estimates: Sequence[Estimate], hardware: Hardware) -> list[str]:
    """Rows of the table; columns on shared experts and shared sequences appear only if there are some."""
    rows = [_cells(item, hardware) for item in estimates]
    shown = {"ep": estimates[0].model.experts > 0, "cp": any(item.run.cp > 1 for item in estimates)}
    columns = [name for name in _WIDTHS if shown.get(name, True)]
    header = {name: name for name in columns}
    return ["".join(f"{row[name]:>{_WIDTHS[name]}}" for name in columns) for row in (header, *rows)]


def _cells(estimate: Estimate, hardware: Hardware) -> dict[str, str]:
    run = estimate.run
    share = estimate.flops_per_device / hardware.peak_flops(PRECISIONS[run.precision])
    sizes = (run.dp, run.cp, run.ep, run.pp, run.interleave, run.micro_batch)
    shown = (
        str(run.tp), "yes" if run.sequence_parallel else "no", *map(str, sizes), _recompute_words(estimate),
        str(run.zero), format_seconds(estimate.step_seconds), f"{share:.1%}", format_bytes(estimate.memory.peak),
    )  # fmt: skip
    return dict(zip(_WIDTHS, shown, strict=True))


def _recompute_words(estimate: Estimate) -> str:
    return "mixed" if estimate.recomputed else estimate.run.recompute


def _first(estimate: Estimate) -> list[str]:
    """Number of layers of the first row by what they recompute, if they differ, and the number in each part."""
    counts = ", ".join(f"{word} of {count}" for word, count in estimate.recomputed)
    recomputed = [f"layers of the first recomputed: {counts}"] if estimate.recomputed else []
    uneven = ", ".join(map(str, estimate.run.stage_layers))
    return [*recomputed, *([f"layers of its parts: {uneven}"] if uneven else [])]


def _certainty(runs: BestRuns) -> list[str]:
    fitting = "" if runs.fitting is None else f" {runs.fitting:,} fit the memory,"
    lines = [f"{runs.possible:,} configurations,{fitting} {runs.simulated} were simulated."]
    if math.isfinite(runs.others_seconds):
        lines.append(
            f"Each of the others takes at least {format_seconds(runs.others_seconds)}: a bound, not simulated."
        )
    return lines


def as_dict(runs: BestRuns, hardware: Hardware) -> dict[str, Any]:
    """The result in SI units; `others_seconds` is null if all were simulated."""
    bound = runs.others_seconds if math.isfinite(runs.others_seconds) else None
    counts = {"possible": runs.possible, "fitting": runs.fitting, "simulated": runs.simulated}
    best, front = ([estimate_dict(item, hardware) for item in items] for items in (runs.best, runs.front))
    return {"best": best, **counts, "others_seconds": bound, **({"front": front} if front else {})}
