"""Writes a cost model file: every constant with its kind and source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoshard.cluster.links_and_constants import CONSTANTS

HEADER = """\
# Constants of the cost formulas for {name} (the formulas are in autoshard/costs/),
# {note}.
# This part is appended to a profile that names it, so it holds tables below [constants] only.

[constants.about]
name = "{name}"
date = "{date}"
calibration = "{calibration}" # fitted: to measurements of this device; none: generic figures
dtypes = "{dtypes}" # that products and attention were fitted for
error = "{error}"
"""


class Entry(NamedTuple):
    """One constant: `value` with its unit where it has one, `kind` of `profile_file.KINDS`."""

    key: str
    value: float | str
    kind: str
    source: str


UNITS = {
    "launch": "us",
    "dispatch": "us",
    "depth": "us",
    "setup": "us",
    "chain": "ns",
    "switch": "KB",
    "cache_size": "KB",
}
SCALE = {"us": 1e-6, "ns": 1e-9, "KB": 1e3}


def entries_of(group: str, constants: Mapping[str, float], kind: str, source: str) -> list[Entry]:
    """Constants with their units; the first names `source`, the others it."""
    entries: list[Entry] = []
    for key, value in constants.items():
        unit = UNITS.get(key.rpartition(".")[2], "")
        shown: float | str = f"{value / SCALE[unit]:.4g} {unit}" if unit else float(f"{value:.4g}")
        entries.append(Entry(f"{group}.{key}", shown, kind, "the same fit" if entries else source))
    return entries


def costmodel_text(
    name: str, note: str, error: str, date: str, entries: Sequence[Entry], calibration: str = "fitted", dtypes: str = ""
) -> str:
    """Cost model in TOML. Entries are written in the order of `CONSTANTS`; of two with one key the first counts."""
    by_key = {entry.key: entry for entry in reversed(entries)}
    parts = [HEADER.format(name=name, note=note, error=error, date=date, calibration=calibration, dtypes=dtypes)]
    table = ""
    for constant in CONSTANTS:
        group, _, key = constant.key.rpartition(".")
        if constant.key not in by_key:
            continue
        if group != table:
            parts.append(f"\n[constants.{group}]\n")
            table = group
        parts.append(f"{key} = {figure_text(by_key[constant.key])}\n")
    return "".join(parts)


def figure_text(entry: Entry) -> str:
    """The value of a figure in a profile: an inline table of TOML."""
    value = f'"{entry.value}"' if isinstance(entry.value, str) else repr(entry.value)
    source = entry.source.replace("\\", "\\\\").replace('"', '\\"')
    return f'{{ value = {value}, kind = "{entry.kind}", source = "{source}" }}'
