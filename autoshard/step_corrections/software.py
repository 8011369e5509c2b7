"""Effects of software on a device in whole steps: other attention kernels, a fused loss, products under load.

The constants of a cost model are those of kernels that run alone. `costmodels/whole_steps/software.toml` lists, with
its sources, how whole training steps of known software differ from them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from autoshard import units
from autoshard.cluster.hardware import Hardware
from autoshard.errors import UsageError
from autoshard.system.files import data_folder

KERNELS = "kernels"  # the constants as they are
PACKAGES = "autoshard"  # the same, of the packages that `autoshard plan` writes
SAME_PEAK = 0.002  # relative: two devices of one generation
# Bytes of a loss over those of one kernel that works in place: 6 passes of the logits to 3; operator by operator in
# float32 (the runtime's own), 60 bytes an element to 6.
FUSED_LOSS = {"memory.loss": 2.0, "memory.parallel_loss": 10.0}
_RATES = ("compute", "memory")


@cache
def tables() -> dict[str, Any]:
    """The whole file."""
    path = data_folder("costmodels") / "whole_steps" / "software.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def names() -> tuple[str, ...]:
    """Names of known software."""
    return tuple(dict.fromkeys((KERNELS, PACKAGES, *tables().get("software", {}), *tables()["memory"])))


def generation(hardware: Hardware) -> str:
    """Generation of the devices, by their peak: `ampere`; "" if it is none of the table."""
    peaks = dict(hardware.peaks)
    peak = peaks.get("bfloat16") or peaks.get("float16") or 0.0
    known = tables()["generations"].items()
    rates = ((name, units.parse_flop_rate(text)) for name, texts in known for text in texts)
    return next((name for name, rate in rates if abs(peak / rate - 1) < SAME_PEAK), "")


@lru_cache(maxsize=256)
def with_software(hardware: Hardware, software: str, attention: str = "", fused_loss: bool = False) -> Hardware:
    """`hardware` with the constants of whole steps. `attention` "" is the kernel that the cost model was fitted to.

    Raises UsageError for a name that is not known, and where nothing is known of it on this device.
    """
    changed = dict(hardware.constants)
    rate = sustained(hardware, software)
    slower = _slower(hardware, attention) if attention else 1.0
    for kind in _RATES:
        changed[f"matmul.{kind}"] *= rate
        changed[f"attention.{kind}"] /= slower
    changed["attention.chain"] *= slower
    if fused_loss:
        changed |= {key: times * changed["memory.default"] for key, times in FUSED_LOSS.items()}
    return replace(hardware, constants=tuple(changed.items()))


def compiled_share(reduces: bool) -> float:
    """Share of the memory's bandwidth that `torch.compile` kernels reach: those that sum along a dim, and others."""
    return float(tables()["compiled"]["reduction" if reduces else "pointwise"]["value"])


@dataclass(frozen=True)
class HeldBytes:
    """Memory that software itself holds: copies of a layer's weights (`weight_gradient_buffers`), bytes of a gradient
    (None: as the precision has it), tensors of a stage's input for each micro-batch in flight, copies of float32 logits
    in a loss over a sharded vocabulary, whether inputs gathered along the sequence are kept whole, bytes of ZeRO's
    buckets, and bytes in use in addition to all that is described."""

    weight_gradient_buffers: float = 0.0
    gradient: float | None = None
    stage_tensors: float = 0.0
    parallel_loss_copies: float = 0.0
    gathered_inputs: float = 0.0
    bucket: float = 0.0
    outside: float = 0.0


@lru_cache(maxsize=64)
def held_bytes(software: str, precision: str) -> HeldBytes:
    """Memory that the software itself holds in a step in `precision`."""
    figures = tables()["memory"].get(_known(software), {})
    values = {key: figure["value"] for key, figure in figures.items() if key != "summary"}
    bucket, outside = (units.parse_bytes(values[key]) if key in values else 0.0 for key in ("bucket", "outside"))
    return HeldBytes(
        values.get("weight_gradient_buffers", 0.0),
        values.get(f"{precision}_gradient"),
        values.get("stage_tensors", 0.0),
        values.get("parallel_loss_copies", 0.0),
        values.get("gathered_inputs", 0.0),
        bucket,
        outside,
    )


def priced_as(software: str) -> str:
    """Software whose rates and host a step has: its own, or that of kernels if nothing is known of them."""
    return software if _known(software) in tables().get("software", {}) else KERNELS


def _known(software: str) -> str:
    if software not in names():
        raise UsageError(f"unknown software {software!r}: there are {', '.join(names())}", "see docs/estimate.md")
    return software


def sustained(hardware: Hardware, software: str) -> float:
    """The share of their rates that matrix products reach in whole steps of `software`."""
    return _of_software(hardware, software).get("products", 1.0)


def host_figures(hardware: Hardware, software: str) -> dict[str, float]:
    """Figures of the software's host: `dispatch`, seconds an operator, and `stall`, seconds a layer."""
    return {key: value for key, value in _of_software(hardware, software).items() if key in ("dispatch", "stall")}


def _of_software(hardware: Hardware, software: str) -> dict[str, float]:
    """The figures of `software` on such devices."""
    if priced_as(software) == KERNELS:
        return {}
    known = {kind: table for kind, table in tables()["software"][software].items() if isinstance(table, dict)}
    family = generation(hardware)
    figures = {kind: _number(table[family]["value"]) for kind, table in known.items() if family in table}
    if not figures:
        there = ", ".join(dict.fromkeys(name for table in known.values() for name in table))
        raise UsageError(_nothing_known("software", software, hardware, there), "leave it out")
    return figures


def _number(value: float | str) -> float:
    return units.parse_seconds(value) if isinstance(value, str) else float(value)


def _slower(hardware: Hardware, attention: str) -> float:
    """Seconds of a fused attention over those of the kernel that the cost model was fitted to."""
    known = tables()["attention"]
    if attention not in known:
        raise UsageError(f"unknown attention {attention!r}: there are {', '.join(known)}", "see docs/estimate.md")
    family = generation(hardware)
    if family not in known[attention]:
        there = ", ".join(key for key, value in known[attention].items() if isinstance(value, dict))
        raise UsageError(_nothing_known("attention", attention, hardware, there), "leave it out")
    return float(known[attention][family]["value"])


def _nothing_known(table: str, name: str, hardware: Hardware, there: str) -> str:
    return f"{table} {name}: nothing is known of it on {hardware.name}, only on {there}"
