"""Error bands of whole steps, from published steps of each kind, which nothing had been fitted to.

`costmodels/whole_steps/bands.toml` has a half-width for each kind of step: the error that most measured steps of the
kind stayed within (written by benchmarks/step_bands.py, which judges it on steps of other models: docs/validation.md).
A kind has a band where steps of two releases or frameworks were measured: the errors of one show little of the next.
One that has fewer has that of its neighbours, kinds of its style with the same software on other devices or on the same
generation with other software (`nearest`). A step of a kind without neighbours reports that none was measured, and its
band is wide: the errors of the constants do not show what a framework, a host or a network adds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from autoshard.cluster.hardware import Hardware
from autoshard.costs.bands import Band, step_band
from autoshard.step_corrections.software import generation
from autoshard.system.files import data_folder

NOT_IN_BANDS = frozenset({"float8"})  # no band was made from steps whose products are in it
UNMEASURED = 0.6  # relative, at least, where no step of the kind was measured
ONE, MANY, ANY = "one", "many", "any"
Known = TypeVar("Known")


@dataclass(frozen=True)
class StepKind:
    """`style`: megatron, fsdp, or autoshard for its own packages; `software`: whose rates are taken (see software.py);
    `nodes`: one or many, in the table of bands also any; `calibrated`: host or kernels were measured where it runs."""

    generation: str
    style: str
    software: str
    nodes: str
    calibrated: bool


def step_kind(hardware: Hardware, style: str, software: str, devices: int, calibrated: bool = False) -> StepKind:
    """Kind of a step on `devices` devices; `calibrated`: also if the profile's host was measured."""
    measured = any(f.key == "constants.host.dispatch" and f.kind == "measured" for f in hardware.figures)
    nodes = ONE if devices <= hardware.devices_per_node else MANY
    return StepKind(generation(hardware), style, software, nodes, calibrated or measured)


def whole_step_band(hardware: Hardware, seconds: Mapping[str, float], dtype: str, kind: StepKind) -> Band:
    """Band of a step that spends `seconds` in each family of operators, see `bands.step_band`."""
    constants = step_band(hardware, seconds, dtype)
    known = None if dtype in NOT_IN_BANDS else known_band(kind)
    if known is None:
        return Band(max(UNMEASURED, constants.error), constants.kind, constants.calibrated, 0)
    error = max(known.error, constants.error) if known.neighbours else known.error
    return Band(error, constants.kind, constants.calibrated, known.steps, known.releases, known.neighbours)


def known_band(kind: StepKind) -> KnownBand | None:
    """Band of the kind, or of its neighbours."""
    return nearest(bands(), kind)


def nearest(known: Mapping[StepKind, Known], kind: StepKind) -> Known | None:
    """First entry that exists: of the kind, with any number of nodes, with the same software on other devices, on the
    same devices with other software. A device of no known generation has no neighbours."""
    either = replace(kind, nodes=ANY)
    beside = (replace(either, generation=ANY), replace(either, software=ANY)) if kind.generation else ()
    names = (kind, either, *beside)
    return next((known[name] for name in names if name in known), None)


@dataclass(frozen=True)
class KnownBand:
    """`error`: half-width; `neighbours`: is it of neighbouring kinds?"""

    error: float
    steps: int
    releases: int
    neighbours: bool


@cache
def bands() -> dict[StepKind, KnownBand]:
    """Known bands by kind; one of any generation, or of any software, is of neighbours."""
    path = data_folder("costmodels") / "whole_steps" / "bands.toml"
    read = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        StepKind(*(entry[key] for key in ("generation", "style", "software", "nodes", "calibrated"))): KnownBand(
            float(entry["error"]),
            int(entry["steps"]),
            int(entry["releases"]),
            ANY in (entry["generation"], entry["software"]),
        )
        for entry in read.get("band", ())
    }
