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
from autoshard.cluster.hardware import load_hardware
from autoshard.system.data_files import data_folder
from autoshard.whole_steps import software
from benchmarks import cluster_steps, fsdp_steps
from benchmarks.steps import (
    Floats,
    Row,
    errors,
    fitted_shapes,
    host_of,
    predict,
    predicted,
    shape_of,
    vtrain,
    with_software,
)

RATES = tuple(float(rate) for rate in np.arange(0.60, 1.001, 0.02))
DISPATCH_SECONDS = tuple(float(seconds) for seconds in np.arange(20e-6, 121e-6, 5e-6))
BEGIN = "[software."
SUMMARIES = {
    "megatron": "Megatron-LM, eager, of 2022: what its host takes for an operator",
    "fsdp": "PyTorch's FSDP, eager, mixed precision (float32 shards)",
    "mindspeed": "MindSpeed-LLM on 910B, MindFormers on 910A, of 2024",
}
SOURCES = {
    "megatron": "single-node steps of vTrain (VIA-Research/vTrain, MIT)",
    "fsdp": "FSDP steps of MPT models (mosaicml/llm-foundry, Apache-2.0)",
    "mindspeed": "steps of MindSpeed-LLM's and MindFormers' READMEs",
}


@dataclass(frozen=True)
class Fit:
    """Rows of one software on one device generation, which of them are fitted to, and what: products or dispatch."""

    software: str
    figure: str
    generation: str
    rows: Sequence[Any]
    seen: Sequence[bool]
    predict: Callable[[Sequence[Any]], Floats]

    @property
    def grid(self) -> tuple[float, ...]:
        return RATES if self.figure == "products" else DISPATCH_SECONDS

    def shown(self, value: float) -> str:
        return f"{value:.2f}" if self.figure == "products" else f'"{value * 1e6:.0f} us"'


def fits(data: Path) -> Iterator[Fit]:
    single = with_software(vtrain(data / "vtrain_a100_single_node.csv"), "megatron")
    shapes = fitted_shapes(single)
    yield Fit("megatron", "dispatch", "ampere", single, [shape_of(r) in shapes for r in single], _single_node)
    for generation, gpus in fsdp_steps.GENERATIONS.items():
        rows = [row for row in fsdp_steps.rows(data) if row.gpu in gpus]
        yield Fit("fsdp", "products", generation, rows, [row.fitted for row in rows], fsdp_steps.predict)
    for profile, generation in (("ascend-910b2", "ascend-910b"), ("ascend-910a", "ascend-910a")):
        own = [row for row in cluster_steps.ascend() if row.hardware.name == profile]
        seen = [cluster_steps.is_fitted(row) for row in own]
        yield Fit("mindspeed", "products", generation, own, seen, cluster_steps.seconds_of)


def _single_node(rows: Sequence[Row]) -> Floats:
    hardware = load_hardware("a100-80g-sxm")
    return predict(rows, hardware, host_of(hardware, "megatron"))


def line(fit: Fit) -> str:
    """One line of the table."""
    found = {value: errors(fit.rows, _predicted(fit, value)) for value in fit.grid}
    seen = np.array(fit.seen)
    best = min(fit.grid, key=lambda value: float(np.abs(np.log1p(found[value][seen])).mean()))
    own, held = (float(np.abs(found[best][half]).mean()) for half in (seen, ~seen))
    source = (
        f"fit to {int(seen.sum())} {SOURCES[fit.software]}, every second model; mean error there {own:.1%}, on the "
        f"{int((~seen).sum())} steps of the other models {held:.1%}"
    )
    return f'{fit.generation} = {{ value = {fit.shown(best)}, kind = "measured", source = "{source}" }}'


def _predicted(fit: Fit, value: float) -> Floats:
    """With `value` instead of what the file has."""
    own = software.tables().setdefault("software", {}).setdefault(fit.software, {})
    own.setdefault(fit.figure, {})[fit.generation] = {"value": value}
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
        head = f"[software.{fit.software}.{fit.figure}]"
        if head not in lines:
            lines += ["", f"[software.{fit.software}]", f'summary = "{SUMMARIES[fit.software]}"', "", head]
        lines.append(line(fit))
        print(lines[-1], flush=True)
    if options.write:
        path = data_folder("costmodels") / "whole_steps" / "software.toml"
        before = path.read_text(encoding="utf-8").partition(BEGIN)[0].rstrip()
        path.write_text("\n".join([before, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
