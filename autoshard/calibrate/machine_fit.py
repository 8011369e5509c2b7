"""A calibration from measurements: fits every family of operators, with the error on rows that it was not fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.calibrate.cost_model_file import Entry, entries_of
from autoshard.calibrate.fitted_models import (
    GROUPS,
    MEMORY_KINDS,
    Attention,
    Collectives,
    MemoryModel,
    Model,
    Products,
    Rows,
)
from autoshard.calibrate.least_squares import DRAWS, fit, held_out_error
from autoshard.cluster.hardware import Hardware
from autoshard.cluster.topology import ring_share
from autoshard.costs.compute import ATTENTION_BACKWARD_FLOPS
from autoshard.redistribute import CARRIED

KIND = {name: collective.constants for name, collective in CARRIED.items() if collective.call}  # what is measured
Table = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """One family that was fitted: `error` is the mean absolute error on held-out rows."""

    name: str
    rows: int
    constants: Mapping[str, float]
    error: float


@dataclass(frozen=True)
class Calibration:
    """`entries` for a cost model. `launch_seconds` belongs into the profile."""

    families: tuple[Family, ...]
    entries: tuple[Entry, ...]
    launch_seconds: float


def calibrate(measured: Mapping[str, Any], hardware: Hardware, dtype: str, source: str) -> Calibration:
    """Fits what `worker` measured. Constants are relative to the peaks, bandwidths and links of `hardware`; collectives
    that were not measured keep its own."""
    peak, bandwidth = hardware.peak_flops(dtype), hardware.memory_bandwidth
    products = Products(peak, bandwidth, hardware.constant("matmul.fill"))
    matmul, memory = _columns(measured["matmul"]), _numbered(measured["memory"], MEMORY_KINDS)
    families = [
        _fitted("matmul", products, matmul),
        _fitted("attention", Attention(peak, bandwidth), _columns(measured["attention"])),
        _fitted("memory", MemoryModel(bandwidth), memory),
    ]
    if measured.get("collective"):
        families.append(_collectives(measured["collective"], hardware))
    by_name = {family.name: family for family in families}
    entries = [entry for family in families for entry in _entries(family, source)]
    for key in ("matmul.fill", "matmul.misaligned"):
        entries.append(Entry(key, hardware.constant(key), "default", "kept"))
    for key, value in _backward(products, by_name["matmul"], matmul).items():
        entries.append(Entry(f"matmul.{key}", value, "measured", f"{source}: median, relative to the forward"))
    relative = _attention_backward(by_name["attention"], _columns(measured["attention"]))
    entries.append(Entry("attention.backward", relative, "measured", f"{source}: median, relative to the forward"))
    dispatch = f"{measured['dispatch_seconds'] * 1e6:.4g} us"
    entries.append(
        Entry("host.dispatch", dispatch, "measured", f"{source}: modules of 8 numbers, forward and backward")
    )
    if "collective" not in by_name:
        entries += _profile_entries(hardware)
    return Calibration(tuple(families), tuple(entries), by_name["memory"].constants["launch"])


def _columns(table: Table) -> Rows:
    return {key: np.array([row[key] for row in table], dtype=float) for key in table[0]}


def _numbered(table: Table, kinds: Sequence[str]) -> Rows:
    return _columns([{**row, "kind": kinds.index(row["kind"])} for row in table])


def _collectives(table: Table, hardware: Hardware) -> Family:
    """Collectives in the innermost level of links; larger groups and outer levels keep what the profile states."""
    link = hardware.links[0]

    def bandwidth(members: int) -> float:
        return link.bandwidth * link.efficiency * ring_share(link.graph, (tuple(range(members)),))

    rows = _columns(
        [
            {"kind": GROUPS.index(KIND[row["kind"]]), "members": row["members"], "bytes": row["bytes"],
             "bandwidth": bandwidth(row["members"]), "seconds": row["seconds"],
             "reduced": row["kind"] == "all_reduce" and row["members"] >= link.reduces_from,
             "scattered": row["kind"] == "reduce_scatter"}
            for row in table
            if row["members"] <= link.devices
        ]
    )  # fmt: skip
    model = Collectives(link.latency_seconds, in_network=bool(rows["reduced"].any()), scatters=True)
    return _fitted("collective", model, rows)


def _fitted(name: str, model: Model, rows: Rows) -> Family:
    return Family(name, len(rows["seconds"]), fit(model, rows).constants, held_out_error(model, rows))


def _entries(family: Family, source: str) -> list[Entry]:
    message = f"{source}: {family.rows} rows, held-out error {family.error:.1%}"
    constants = dict(family.constants)
    if family.name == "memory":
        del constants["launch"]  # the profile has it
        constants["cache"] = 1 + constants.pop("cache_excess")
    error = Entry(
        f"error.{family.name}", float(f"{family.error:.3g}"), "measured", f"{source}: held out, {DRAWS} draws"
    )
    return [*entries_of(family.name, constants, "measured", message), error]


def _backward(model: Products, family: Family, rows: Rows) -> dict[str, float]:
    """Rate of the two products of a backward relative to the forward's formula for their shapes."""
    swapped = {"dgrad": ("m", "k", "n"), "wgrad": ("n", "k", "m")}  # rows, columns, summed
    forward = np.median(model.seconds(family.constants, rows) / rows["seconds"])
    rates = {}
    for key, (m, n, k) in swapped.items():
        shape = {"m": rows[m], "n": rows[n], "k": rows[k], "item_bytes": rows["item_bytes"]}
        ratio = np.median(model.seconds(family.constants, shape) / rows[f"{key}_seconds"])
        rates[key] = float(f"{ratio / forward:.3g}")
    return rates


def _attention_backward(family: Family, rows: Rows) -> float:
    """Rate of the backward relative to the forward's, launches aside."""
    launch = family.constants["launch"]
    long = (rows["seconds"] > 2 * launch) & (rows["backward_seconds"] > 2 * launch)
    if not long.any():
        return 1.0
    ratios = (rows["seconds"][long] - launch) / (rows["backward_seconds"][long] - launch)
    return float(f"{ATTENTION_BACKWARD_FLOPS * np.median(ratios):.3g}")


def _profile_entries(hardware: Hardware) -> list[Entry]:
    """Constants of collectives as the profile had them."""
    shown = {"launch": 1e-6, "setup": 1e-6}
    entries = []
    for key, value in hardware.constants:
        if key.startswith("collective.") or key == "error.collective":
            last = key.rpartition(".")[2]
            text: float | str = f"{value / shown[last]:g} us" if last in shown else value
            entries.append(Entry(key, f"{value:g} B" if last == "switch" else text, "default", "kept: not measured"))
    return entries
