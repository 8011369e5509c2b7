"""A profile written from a real run: another profile's constants, with those changed that the run measures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from autoshard.calibrate.cost_model_file import Entry, costmodel_text, entries_of
from autoshard.calibrate.profile_text import check_target, costs_path, profile_text
from autoshard.calibrate.run_fit import RunFit
from autoshard.cluster.hardware import Hardware, parse_hardware
from autoshard.code_text import typed
from autoshard.system.files import write_text
from autoshard.units import format_seconds

_NUMBER = re.compile(r"[-+.\d]+(e[-+]?\d+)?")


@dataclass(frozen=True)
class RunFiles:
    """The two files, and what they were made from."""

    profile: Path
    costmodel: Path
    fitted: RunFit


def check_out(out: Path) -> None:
    """Raises UsageError, before anything is measured or simulated, where `out` can't be written."""
    check_target(out, (out, costs_path(out)))


def write_run(out: Path, hardware: Hardware, fitted: RunFit, run: str) -> RunFiles:
    """`hardware` is the profile that the run was predicted with; `run` says which run it was."""
    source = f"autoshard compare: {run}"
    costs = costs_path(out)
    profile = profile_text(hardware, out, fitted.hardware.launch_seconds, source)
    constants = costmodel_text(
        costs.stem, f"those of {hardware.name}, families of operators as {run} has them", hardware.error,
        date.today().isoformat(), _entries(hardware, fitted, source), "fitted" if hardware.calibrated else "none",
        ", ".join(hardware.fitted_dtypes),
    )  # fmt: skip
    parse_hardware(f"{profile}\n{constants}", str(out))  # before a file is there
    write_text(costs, constants)
    write_text(out, profile)
    return RunFiles(out, costs, fitted)


def _entries(hardware: Hardware, fitted: RunFit, source: str) -> list[Entry]:
    """Every constant that the profile writes down, or that changed."""
    known = {figure.key.removeprefix("constants."): figure for figure in hardware.figures}
    entries = []
    for key, value in fitted.hardware.constants:
        group, _, last = key.rpartition(".")
        if key in fitted.changed:
            was = f", {known[key].value} before" if key in known else ""
            entries += entries_of(group, {last: value}, "measured", f"{source}{was}")
        elif key in known:
            figure = known[key]
            number = float(figure.value) if _NUMBER.fullmatch(figure.value) else figure.value
            entries.append(Entry(key, number, figure.kind, figure.source))
    return entries


def summary(written: RunFiles) -> str:
    """Text on what the run changed, and how to use it."""
    fit = written.fitted
    lines = [
        f"calibrated by this run: the step was predicted as {format_seconds(fit.before_seconds)}, is now "
        f"{format_seconds(fit.after_seconds)}, took {format_seconds(fit.measured_seconds)}",
        *([f"left as the profile has them: {', '.join(fit.left_out)} (links between nodes: see `autoshard calibrate` "
           "under torchrun)"] if fit.left_out else []),
        f"written to {written.profile} and {written.costmodel}",
        f"next: autoshard plan … --hardware {typed(written.profile)}",
    ]  # fmt: skip
    return "\n".join(lines)


def as_dict(written: RunFiles) -> Mapping[str, Any]:
    """The written files for `--json`."""
    fit = written.fitted
    return {
        "profile": str(written.profile),
        "costmodel": str(written.costmodel),
        "before_seconds": fit.before_seconds,
        "after_seconds": fit.after_seconds,
        "measured_seconds": fit.measured_seconds,
        "ratios": dict(fit.ratios),
        "changed": list(fit.changed),
        "left_out": list(fit.left_out),
    }
