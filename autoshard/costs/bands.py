"""How sure a prediction is: the errors of the constants, from their validation, carried through to a step.

Operators of one family (products, attention, other operators, collectives) err together, families independently, so a
step that spends t_f seconds in family f with relative error e_f is sure to sqrt(sum((t_f e_f)^2)) / sum(t_f). What no
constant holds, such as work of the framework that is not in the program, is not in the band.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.costs.compute import ATTENTION, PRODUCTS
from autoshard.hardware import Hardware

NAMES = {
    "matmul": "products",
    "attention": "attention",
    "memory": "other operators",
    "collective": "collectives",
}
COUNTS = 0.05  # of a step: a family with less does not decide where its figures come from
_ORDER = ("measured", "datasheet", "default")


@dataclass(frozen=True)
class Band:
    """`error` is relative, of either sign. `kind`, of the weakest figures that matter: measured (constants fitted to
    this device), datasheet (its peaks, with efficiencies of other devices) or default."""

    error: float
    kind: str
    calibrated: bool

    def __str__(self) -> str:
        words = self.kind if self.calibrated else f"uncalibrated, {self.kind} figures"
        return f"±{self.error:.0%} ({words})"


def family(target: str) -> str:
    """The constants that price an operator: matmul, attention or memory."""
    return "matmul" if target in PRODUCTS else "attention" if target in ATTENTION else "memory"


def error_of(hardware: Hardware, name: str) -> float:
    """The mean relative error of a family, from the validation of the constants."""
    return hardware.constant(f"error.{name}")


def kind_of(hardware: Hardware, name: str) -> str:
    """Where the figures of a family come from."""
    kinds = {figure.key: figure.kind for figure in hardware.figures}
    if kinds.get(f"constants.error.{name}") == "measured":
        return "measured"
    base = [key for key in kinds if key.startswith("links[" if name == "collective" else "device.peak.")]
    known = any(kinds[key] != "default" for key in base if name != "collective" or key.endswith(".bandwidth"))
    return "datasheet" if known else "default"


def step_band(hardware: Hardware, seconds: Mapping[str, float]) -> Band:
    """The band of a step that spends `seconds` in each family."""
    total = math.fsum(seconds.values())
    spread = math.sqrt(math.fsum((own * error_of(hardware, name)) ** 2 for name, own in seconds.items()))
    kinds = [kind_of(hardware, name) for name, own in seconds.items() if total and own >= COUNTS * total]
    return Band(spread / total if total else 0.0, max(kinds, key=_ORDER.index, default="default"), hardware.calibrated)


def provenance(hardware: Hardware) -> str:
    """One sentence: how sure each family of predictions is on this hardware."""
    errors = ", ".join(
        f"{shown} ±{error_of(hardware, name):.0%} ({kind_of(hardware, name)})" for name, shown in NAMES.items()
    )
    return errors if hardware.calibrated else f"uncalibrated, nothing was fitted to this device: {errors}"
