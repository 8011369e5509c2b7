"""Fits `sustained` of `--software fsdp` to half of the published FSDP steps.

    python benchmarks/fit_software.py --data DIR [--write]

One number a device generation: the share of their rates that matrix products reach in whole steps, the least mean
absolute error of its logarithm over the models in `fsdp_steps.FITTED`. `--write` puts it into
costmodels/whole_steps/software.toml.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from autoshard.costs import software
from autoshard.system.data_files import data_folder
from benchmarks import fsdp_steps

GRID = np.arange(0.60, 1.001, 0.02)
BEGIN = "[software.fsdp]"
SUMMARY = "PyTorch's FSDP, eager, mixed precision (float32 shards)"
SOURCE = (
    "fit to the {count} FSDP steps of the MPT models {models} (mosaicml/llm-foundry, Apache-2.0); mean error there "
    "{own:.1%}, on the {others} steps of the other models {held:.1%}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    everything = fsdp_steps.rows(options.data)
    lines = [BEGIN, f'summary = "{SUMMARY}"']
    for generation, gpus in fsdp_steps.GENERATIONS.items():
        own = [row for row in everything if row.gpu in gpus]
        errors = {rate: fsdp_steps.errors(own, _predicted(own, generation, float(rate))) for rate in GRID}
        seen = np.array([row.fitted for row in own])
        best = min(GRID, key=lambda rate: float(np.abs(np.log1p(errors[rate][seen])).mean()))
        halves = [float(np.abs(errors[best][half]).mean()) for half in (seen, ~seen)]
        source = SOURCE.format(
            count=int(seen.sum()), models=", ".join(fsdp_steps.FITTED), own=halves[0], others=int((~seen).sum()),
            held=halves[1],
        )  # fmt: skip
        lines.append(f'{generation} = {{ value = {best:.2f}, kind = "measured", source = "{source}" }}')
    print("\n".join(lines))
    if options.write:
        path = data_folder("costmodels") / "whole_steps" / "software.toml"
        before = path.read_text(encoding="utf-8").partition(BEGIN)[0].rstrip()
        path.write_text("\n".join([before, "", *lines, ""]), encoding="utf-8")


def _predicted(rows: list[fsdp_steps.FsdpRow], generation: str, rate: float) -> fsdp_steps.Floats:
    """With `rate` instead of what the file has."""
    software.tables().setdefault("software", {}).setdefault("fsdp", {})[generation] = {"value": rate}
    software.with_software.cache_clear()
    fsdp_steps.predicted.cache_clear()
    return fsdp_steps.predict(rows)


if __name__ == "__main__":
    main()
