"""Fits the rate of products in whole steps, by software and device, to half of the published steps.

    python benchmarks/fit_software.py --data DIR [--write]

One number each: the least mean absolute error of its logarithm over every second model; the others are what it is
judged on. `--write` puts them into costmodels/whole_steps/software.toml.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from autoshard.costs import software
from autoshard.system.data_files import data_folder
from benchmarks import cluster_steps, fsdp_steps
from benchmarks.steps import Floats, errors, predicted

GRID = np.arange(0.60, 1.001, 0.02)
BEGIN = "[software.fsdp]"
SUMMARIES = {
    "fsdp": "PyTorch's FSDP, eager, mixed precision (float32 shards)",
    "mindspeed": "MindSpeed-LLM on 910B, MindFormers on 910A, of 2024",
}
SOURCES = {
    "fsdp": "FSDP steps of MPT models (mosaicml/llm-foundry, Apache-2.0)",
    "mindspeed": "steps of MindSpeed-LLM's and MindFormers' READMEs",
}


@dataclass(frozen=True)
class Fit:
    """Rows of one software on one device generation, and which of them are fitted to."""

    software: str
    generation: str
    rows: Sequence[Any]
    seen: Sequence[bool]
    predict: Callable[[Sequence[Any]], Floats]


def fits(data: Path) -> Iterator[Fit]:
    for generation, gpus in fsdp_steps.GENERATIONS.items():
        rows = [row for row in fsdp_steps.rows(data) if row.gpu in gpus]
        yield Fit("fsdp", generation, rows, [row.fitted for row in rows], fsdp_steps.predict)
    for profile, generation in (("ascend-910b2", "ascend-910b"), ("ascend-910a", "ascend-910a")):
        own = [row for row in cluster_steps.ascend() if row.hardware.name == profile]
        yield Fit("mindspeed", generation, own, [cluster_steps.is_fitted(r) for r in own], cluster_steps.seconds_of)


def figure(fit: Fit) -> str:
    """One line of the table."""
    found = {rate: errors(fit.rows, _predicted(fit, float(rate))) for rate in GRID}
    seen = np.array(fit.seen)
    best = min(GRID, key=lambda rate: float(np.abs(np.log1p(found[rate][seen])).mean()))
    own, held = (float(np.abs(found[best][half]).mean()) for half in (seen, ~seen))
    source = (
        f"fit to {int(seen.sum())} {SOURCES[fit.software]}, every second model; mean error there {own:.1%}, on the "
        f"{int((~seen).sum())} steps of the other models {held:.1%}"
    )
    return f'{fit.generation} = {{ value = {best:.2f}, kind = "measured", source = "{source}" }}'


def _predicted(fit: Fit, rate: float) -> Floats:
    """With `rate` instead of what the file has."""
    software.tables()["software"].setdefault(fit.software, {})[fit.generation] = {"value": rate}
    software.with_software.cache_clear()
    predicted.cache_clear()
    return fit.predict(fit.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines: list[str] = []
    for fit in fits(options.data):
        if f"[software.{fit.software}]" not in lines:
            lines += ["", f"[software.{fit.software}]", f'summary = "{SUMMARIES[fit.software]}"']
        lines.append(figure(fit))
        print(lines[-1], flush=True)
    if options.write:
        path = data_folder("costmodels") / "whole_steps" / "software.toml"
        before = path.read_text(encoding="utf-8").partition(BEGIN)[0].rstrip()
        path.write_text("\n".join([before, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
