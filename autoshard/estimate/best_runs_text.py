"""The best configurations as a table, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard.cluster.hardware import Hardware
from autoshard.estimate.best_runs import BestRuns
from autoshard.estimate.estimate_text import as_dict as estimate_dict
from autoshard.estimate.step import Estimate
from autoshard.estimate.transformer import PRECISIONS
from autoshard.units import format_bytes, format_seconds

_HEADER = ("tp", "seq", "dp", "pp", "chunks", "micro", "recompute", "zero", "step", "of peak", "memory")
_WIDTHS = (4, 4, 6, 5, 7, 6, 10, 5, 10, 8, 11)


def text(found: BestRuns, hardware: Hardware) -> str:
    """A row a configuration, fastest first, and how sure it is that none is missing."""
    first = found.best[0]
    return "\n".join(
        [
            f"transformer of {first.parameters / 1e9:.4g} billion parameters, {first.run.batch} sequences a step on "
            f"{first.run.devices} devices of {hardware.name}",
            "",
            _row(_HEADER),
            *(_row(_cells(made, hardware)) for made in found.best),
            "",
            f"error band of the first {first.band}",
            *_certainty(found),
        ]
    )


def _row(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _cells(made: Estimate, hardware: Hardware) -> tuple[str, ...]:
    run = made.run
    share = made.flops_per_device / hardware.peak_flops(PRECISIONS[run.precision])
    return (
        str(run.tp), "yes" if run.sequence_parallel else "no", str(run.dp), str(run.pp), str(run.interleave),
        str(run.micro_batch), run.recompute, str(run.zero), format_seconds(made.step_seconds), f"{share:.1%}",
        format_bytes(made.memory.peak),
    )  # fmt: skip


def _certainty(found: BestRuns) -> list[str]:
    lines = [f"{found.possible:,} configurations, {found.fitting:,} fit the memory, {found.simulated} were simulated."]
    if math.isfinite(found.others_seconds):
        lines.append(
            f"Each of the others takes at least {format_seconds(found.others_seconds)}: a bound, not simulated."
        )
    return lines


def as_dict(found: BestRuns, hardware: Hardware) -> dict[str, Any]:
    """In SI units; `others_seconds` is null where all were simulated."""
    bound = found.others_seconds if math.isfinite(found.others_seconds) else None
    counts = {"possible": found.possible, "fitting": found.fitting, "simulated": found.simulated}
    return {"best": [estimate_dict(made, hardware) for made in found.best], **counts, "others_seconds": bound}
