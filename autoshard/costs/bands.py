"""Error bands of predictions: the errors of the constants, from their validation, carried through to a step.

Operators of one family (products, attention, other operators, collectives) err together, families independently, so a
step that spends t_f seconds in family f with relative error e_f is sure to sqrt(sum((t_f e_f)^2)) / sum(t_f)
(implemented in `bands.step_band`). What no
constant holds, such as work of the framework that is not in the program, is not in the band. Products and attention in
a dtype that the constants were not fitted in are as unsure as on a device that they were not fitted on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cluster.hardware import Hardware
from autoshard.rules.algebra.operator_record import Product, Work
from autoshard.rules.operators import record

NAMES = {
    "matmul": "matmuls",
    "attention": "attention",
    "memory": "other operators",
    "collective": "collectives",
}
COUNTS = 0.05  # of a whole: what has less decides nothing and is not named
OTHER_DTYPE_ERROR = 0.2  # constants of other devices gave 12 to 21 % on A100 to B200
_BY_DTYPE = ("matmul", "attention")
_ORDER = ("measured", "datasheet", "default")


@dataclass(frozen=True)
class Band:
    """`error` is relative, of either sign. `kind`, of the weakest figures that matter: measured (constants fitted to
    this device), datasheet (its peaks, with efficiencies of other devices) or default. `steps`: whole steps of its kind
    that the band was made from (None: of the constants alone), of so many `releases` or frameworks; `neighbours`: True
    if they are also of neighbouring kinds."""

    error: float
    kind: str
    calibrated: bool
    steps: int | None = None
    releases: int = 0
    neighbours: bool = False

    def __str__(self) -> str:
        words = self.kind if self.calibrated else f"uncalibrated, {self.kind} figures"
        if self.steps is not None:
            which = "steps of neighbouring kinds" if self.neighbours else "such steps"
            measured = (
                f"from {self.steps} {which}, {self.releases} releases"
                if self.steps
                else "not validated by measurements"
            )
            words = measured if self.calibrated else f"{measured}, uncalibrated"
        return f"±{self.error:.0%} ({words})"


def family(target: str) -> str:
    """The constants that price an operator: matmul, attention or memory."""
    work = record(target).work
    return "matmul" if isinstance(work, Product) else "attention" if work is Work.ATTENTION else "memory"


def error_of(hardware: Hardware, name: str, dtype: str = "") -> float:
    """The mean relative error of a family, from the validation of the constants."""
    error = hardware.constant(f"error.{name}")
    return error if _fitted_in(hardware, name, dtype) else max(error, OTHER_DTYPE_ERROR)


def _fitted_in(hardware: Hardware, name: str, dtype: str) -> bool:
    """True where the family's constants hold for `dtype`; "" asks for those that they were fitted in."""
    return name not in _BY_DTYPE or not dtype or dtype in hardware.fitted_dtypes


def kind_of(hardware: Hardware, name: str, dtype: str = "") -> str:
    """Origin of the figures of a family: measured, datasheet or default."""
    kinds = {figure.key: figure.kind for figure in hardware.figures}
    if kinds.get(f"constants.error.{name}") == "measured" and _fitted_in(hardware, name, dtype):
        return "measured"
    base = [key for key in kinds if key.startswith("links[" if name == "collective" else "device.peak.")]
    known = any(kinds[key] != "default" for key in base if name != "collective" or key.endswith(".bandwidth"))
    return "datasheet" if known else "default"


def step_band(hardware: Hardware, seconds: Mapping[str, float], dtype: str = "") -> Band:
    """The band of a step that spends `seconds` in each family, its products and attention in `dtype`."""
    total = math.fsum(seconds.values())
    spread = math.sqrt(math.fsum((spent * error_of(hardware, name, dtype)) ** 2 for name, spent in seconds.items()))
    kinds = [kind_of(hardware, name, dtype) for name, spent in seconds.items() if total and spent >= COUNTS * total]
    return Band(spread / total if total else 0.0, max(kinds, key=_ORDER.index, default="default"), hardware.calibrated)


def provenance(hardware: Hardware) -> str:
    """Sentence on how sure each family of predictions is on this hardware."""
    errors = ", ".join(
        f"{shown} ±{error_of(hardware, name):.0%} ({_kind_words(hardware, name)})" for name, shown in NAMES.items()
    )
    return errors if hardware.calibrated else f"uncalibrated, nothing was fitted to this device: {errors}"


def _kind_words(hardware: Hardware, name: str) -> str:
    kind = kind_of(hardware, name)
    inside = name in _BY_DTYPE and kind == "measured" and hardware.fitted_dtypes
    return f"{kind}, {' and '.join(hardware.fitted_dtypes)}" if inside else kind
