"""Fits the rate of products in whole steps, or a host, by software and device, to half of the published steps.

    python -m benchmarks.fit_software --data DIR [--write]

The least mean absolute error of its logarithm over half of the models; the others are what it is judged on. `--write`
puts them into costmodels/whole_steps/software.toml.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from autoshard.step_corrections import software
from autoshard.system.files import data_folder
from benchmarks import harness
from benchmarks import published_rows as runs
from benchmarks.megatron_steps import DISPATCH_SECONDS, STALL_SECONDS
from benchmarks.published_rows import Floats, Step, errors, predicted, seconds_of, with_software

RATES = tuple(float(rate) for rate in np.arange(0.60, 1.001, 0.02))
PRODUCTS = ("products",)
GRIDS = {"products": RATES, "dispatch": DISPATCH_SECONDS, "stall": STALL_SECONDS}
BEGIN = "# What follows is written by benchmarks/fit_software.py."
FITS = harness.rows_of("fit_software.toml")


@dataclass(frozen=True)
class Fit:
    """Rows of one software on one device generation, and what is fitted to some of them: the rate of products, or a
    host's seconds an operator and a layer."""

    software: str
    figures: tuple[str, ...]
    generation: str
    rows: Sequence[Step]

    @property
    def grid(self) -> Iterator[tuple[float, ...]]:
        return product(*(GRIDS[figure] for figure in self.figures))


def shown(figure: str, value: float) -> str:
    return f"{value:.2f}" if figure == "products" else f'"{value * 1e6:.0f} us"'


def fits(data: Path) -> Iterator[Fit]:
    yield Fit(runs.MEGATRON, ("dispatch", "stall"), "ampere", with_software(runs.single_rows(data), runs.MEGATRON))
    for generation, gpus in runs.GENERATIONS.items():
        yield Fit(runs.FSDP_SOFTWARE, PRODUCTS, generation, [row for row in runs.mpt(data) if row.workload[0] in gpus])
    for profile, generation in (("ascend-910b2", "ascend-910b"), ("ascend-910a", "ascend-910a")):
        yield Fit(runs.ASCEND, PRODUCTS, generation, [row for row in runs.ascend() if row.hardware.name == profile])


def lines_of(fit: Fit) -> dict[str, str]:
    """The line of each figure's table."""
    near = replace(fit, rows=[row for row in fit.rows if row.fitted])
    seen = np.array([row.fitted for row in fit.rows])
    grid_errors = {values: errors(near.rows, _predicted(near, values)) for values in fit.grid}
    best = min(grid_errors, key=lambda values: float(np.abs(np.log1p(grid_errors[values])).mean()))
    held = float(np.abs(errors(fit.rows, _predicted(fit, best))[~seen]).mean())
    source = (
        f"fit to {int(seen.sum())} {FITS[fit.software]['source']}; mean error there "
        f"{np.abs(grid_errors[best]).mean():.1%}, on the {int((~seen).sum())} steps of the other models {held:.1%}"
    )
    return {
        figure: f'{fit.generation} = {{ value = {shown(figure, value)}, kind = "measured", source = "{source}" }}'
        for figure, value in zip(fit.figures, best, strict=True)
    }


def _predicted(fit: Fit, values: tuple[float, ...]) -> Floats:
    """With `values` instead of what the file has."""
    figures = software.tables().setdefault("software", {}).setdefault(fit.software, {})
    for figure, value in zip(fit.figures, values, strict=True):
        figures.setdefault(figure, {})[fit.generation] = {"value": value}
    software.with_software.cache_clear()
    predicted.cache_clear()
    return seconds_of(fit.rows)


def main() -> None:
    options = harness.options(__doc__, data=True).parse_args()
    lines: list[str] = []
    for fit in fits(options.data):
        top = f"[software.{fit.software}]"
        if top not in lines:
            lines += ["", top, f'summary = "{FITS[fit.software]["summary"]}"']
        for figure, text in lines_of(fit).items():
            head = f"[software.{fit.software}.{figure}]"
            lines += ["", head] * (head not in lines) + [text]
            print(head, text, flush=True)
    if options.write:
        path = data_folder("costmodels") / "whole_steps" / "software.toml"
        before = path.read_text(encoding="utf-8").partition(BEGIN)[0].rstrip()
        path.write_text("\n".join([before, "", BEGIN, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
