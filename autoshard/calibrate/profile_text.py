"""A profile with constants of its own: the text of another profile, changed where it was measured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from autoshard.calibrate.cost_model_file import Entry, figure_text
from autoshard.cluster.hardware import Hardware
from autoshard.code_text import typed
from autoshard.errors import UsageError

_COSTS = re.compile(r"^(# Constants of the cost formulas|\[constants)", re.MULTILINE)


def costs_path(profile: Path) -> Path:
    """Path of the constants of a written profile."""
    return profile.with_name(f"{profile.stem}-costs.toml")


def check_target(out: Path, files: Iterable[Path]) -> None:
    """UsageError where the profile can't be written as `out`, or one of `files` is there already."""
    if out.suffix != ".toml":
        near = out.with_name(f"{out.name}.toml")
        raise UsageError(f"--out {out}: expected a name that ends in .toml", f"--out {typed(near)}")
    there = [str(path) for path in files if path.exists()]
    if there:
        raise UsageError(f"{there[0]} exists already", "--out with another name")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}", f"mkdir -p {typed(out.parent)}")


def profile_text(hardware: Hardware, out: Path, launch_seconds: float, source: str) -> str:
    """The profile of `hardware` under the name of `out`, with the constants of `costs_path(out)`."""
    text = _COSTS.split(hardware.text)[0].rstrip() + "\n"
    figure = figure_text(Entry("launch_overhead", f"{launch_seconds * 1e6:.4g} us", "measured", source))
    for key, value in (
        ("name", f'"{out.stem}"'),
        ("costmodel", f'"{costs_path(out).name}"'),
        ("launch_overhead", figure),
    ):
        text = re.sub(rf"^{key} = .*$", lambda _, key=key, value=value: f"{key} = {value}", text, count=1, flags=re.M)
    return text
